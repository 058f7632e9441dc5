"""14  Sequence parallelism: between the cut products the rows are dealt out, for the same bytes on the wire.

    tensor parallel      x [t, h] on every rank        all-reduce after attention and MLP: y = sum_r y_r
    sequence parallel    x [t/tp, h], own rows         all-gather before, reduce-scatter after: together the same bytes

An all-reduce is a reduce-scatter and then an all-gather. Between the two every rank may work on its own rows only:
norms, dropout and residuals are row by row. Work and activations there shrink to 1/tp; what a norm's weight learns is
then a sum over the ranks (Korthikanti et al. 2022).

    GatherFromSP       V to R    forward: all-gather        backward: reduce-scatter
    ReduceScatterToSP  P to V    forward: reduce-scatter    backward: all-gather          each is the other's conjugate
"""

from dataclasses import replace

import numpy as np
from course import Watched, exercise, nbytes, on_ranks, prove, say, say_each

from mpitp.comm import Group, SerialGroup
from mpitp.layers import make_site
from mpitp.models import Batch, config_from_hf, new_model
from mpitp.optim.grad_sync import sync_gradients

RANKS = 3
RAW = {"model_type": "llama", "vocab_size": 29, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1}
RAW |= {"intermediate_size": 17, "max_position_embeddings": 16, "initializer_range": 0.3}
TOKENS = np.random.default_rng(14).integers(0, 29, (2, 6))  # t = 10 rows: 4 + 3 + 3 on three ranks


def model_on(group: Group, *, sequence_parallel: bool):
    """The same weights in either layout."""
    site = replace(make_site(group, dtype="float64"), sequence_parallel=sequence_parallel)
    return new_model(config_from_hf(RAW), site, seed=14)


def step(model) -> float:
    """Loss; the gradients stay in the parameters."""
    batch = Batch.of_rows(TOKENS[:, :-1], TOKENS[:, 1:])
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.num_targets)
    return loss


def main(group: Group) -> None:
    bytes_of = {}
    for name, flag in (("tensor", False), ("sequence", True)):
        watched = Watched(group)
        model = model_on(watched, sequence_parallel=flag)
        watched.calls.clear()
        loss = step(model)
        calls = [call for call in watched.calls if len(call.shape) == 2 and call.shape[1] == RAW["hidden_size"]]
        say(group, f"{name} parallel: what carries rows of width {RAW['hidden_size']}")
        for op in sorted({call.op for call in calls}):
            some = [call for call in calls if call.op == op]
            say(group, f"   {len(some)} x {op:<15} of {[list(call.shape) for call in some][0]} ... on rank 0")
        wire = {"all_reduce": 2.0, "all_gather": group.size, "reduce_scatter": 1.0}  # times (p - 1) / p of the bytes
        sent = sum(wire[call.op] * nbytes(call) for call in calls) * (group.size - 1) / group.size
        bytes_of[name] = float(group.all_reduce(np.array([sent]))[0])
    say(group, f"a ring's bytes, all ranks: {bytes_of['tensor']:.0f} and {bytes_of['sequence']:.0f}")

    norm = model["blocks.0.norm1"].weight
    say(group, "\nthe norm before attention: each rank saw its own rows; its gradient is P")
    say_each(group, f"dw[:3] {np.round(norm.grad[:3], 4)}")
    sync_gradients((param for _, param in model.named_params()), model.site.mesh)

    alone = model_on(SerialGroup(), sequence_parallel=False)
    prove(group, "loss", (loss, step(alone)))
    prove(group, "the norm's gradient, summed", (norm.grad, alone["blocks.0.norm1"].weight.grad), limit=1e-12)
    exercise(
        group,
        "Which letter has x between the blocks in each layout? Leave out sync_gradients: which gradients are wrong, "
        "and why does the first loss not show it? (Public frameworks have had this fault.)",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
