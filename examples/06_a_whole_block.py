"""06  A whole transformer block: two all-reduces forward, two backward, every gradient that of one rank.

    x1 = x  + attention(norm1(x))          heads dealt to the ranks
    y  = x1 + mlp(norm2(x1))               FFN columns dealt to the ranks

Norms and residuals are computed by every rank alike, on the whole width. That costs arithmetic and saves a collective.
The gradient of a shard needs no communication after the block's own: each rank can update its own rows at once.
"""

import numpy as np
from course import Watched, difference, exercise, nbytes, on_ranks, prove, say

from mpitp.comm import Group, SerialGroup
from mpitp.layers import Builder, Param, Pass, Rotary, Rows, TransformerBlock, init_params, make_site, typed_layers
from mpitp.models import config_from_hf
from mpitp.models.llama import build_block
from mpitp.optim.grad_norm import GradNorm

RANKS = 3
ROWS = Rows.of(lengths=(6, 4))
CONFIG = config_from_hf(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 31,
        "max_position_embeddings": 16,
    }
)


def make_block(group: Group) -> TransformerBlock:
    """The block of a Llama-type model, equal weights at every rank count."""
    build, rotary = Builder(make_site(group, dtype="float64"), 0.3), Rotary(CONFIG.head_dim, 1e4)
    block = build_block(CONFIG, build, 0, rotary)
    init_params(block.params().items(), seed=6)
    return block


def same_rows(param: Param, whole: Param) -> list[tuple[np.ndarray, np.ndarray]]:
    """This rank's gradient beside the same elements of the one-rank gradient, part by part."""
    both = zip(param.placement.places(), whole.placement.places(), strict=True)
    return [(param.grad[here], whole.grad[there][part.index]) for (part, here), (_, there) in both]


def main(group: Group) -> None:
    watched = Watched(group)
    block, whole = make_block(watched), make_block(SerialGroup())
    x, dy = np.random.default_rng(6).standard_normal((2, ROWS.num_tokens, CONFIG.hidden_size))

    say(group, "what each layer of the block makes of what it is given:")
    for name, layer in typed_layers({"block": block}, make_site(group).batch_type).items():
        say(group, f"  {name:<24}{layer.incoming} -> {layer.outgoing}")
    say(group)

    watched.calls.clear()
    y, ctx = block.forward(x, Pass(ROWS))
    forward = list(watched.calls)
    dx = block.backward(dy, ctx)
    backward = watched.calls[len(forward) :]
    for name, calls in (("forward", forward), ("backward", backward)):
        say(group, f"{name}: {len(calls)} collectives, {sum(map(nbytes, calls))} bytes a rank")
        say(group, "\n".join(f"  {call}" for call in calls))
    whole_y, whole_ctx = whole.forward(x, Pass(ROWS))
    say(group)
    prove(group, "y", (y, whole_y))
    prove(group, "dx", (dx, whole.backward(dy, whole_ctx)))

    say(group, f"\n{'parameter':<24}{'on rank 0':<12}{'of':<12}difference of the gradient")
    grads = []
    for name, param in block.params().items():
        rows = same_rows(param, whole.params()[name])
        whole_shape = whole.params()[name].data.shape
        say(group, f"{name:<24}{param.data.shape!s:<12}{whole_shape!s:<12}{difference(group, *rows):.1e}")
        grads += rows
    prove(group, "every gradient", *grads)
    norms = [GradNorm(b.params().items(), g)() for b, g in ((block, group), (whole, SerialGroup()))]
    say(group, f"\nnorm of all gradients {norms[0]:.9f}: each element counted by its one owner")
    prove(group, "the gradient norm", (norms[0], norms[1]))

    exercise(
        group,
        "On 3 ranks backward has two collectives more than forward. What do they sum? Set RANKS = 2 and they are gone: "
        "why? And on 3 ranks, why does the norm still count each KV head's weights once?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
