"""One random configuration, and the two promises it is held to: equal to the one-rank model, and invariant to the bit.

A case's `repr` is Python, so a failing one can be run again by the command that its failure prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.comm import Group, make_mesh, run_threads
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch, CausalLM, DecoderConfig, build_model
from mpitp.models.config import Dropouts
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep
from tests.sharded import assert_close, assert_same_bits, fill, gradients, weights

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A small model, a batch for it, and a layout. `blocks`: of the invariant mode; no more ranks than that there."""

    family: str
    ranks: int
    blocks: int
    kv_heads: int
    group_size: int  # query heads a KV head (GPT-2 has one)
    head_dim: int
    hidden: int  # GPT-2's is heads * head_dim
    ffn: int
    vocab: int
    layers: int
    lengths: tuple[int, ...]
    biases: bool  # of Llama; GPT-2 has them
    tied: bool
    dropout: float
    weights: tuple[int, ...] = ()  # one for each rank, of which some may be 0; none: equal ones

    def config(self) -> DecoderConfig:
        is_gpt2 = self.family == "gpt2"
        group_size = 1 if is_gpt2 else self.group_size
        heads = self.kv_heads * group_size
        return DecoderConfig(
            model_type=self.family,
            vocab_size=self.vocab,
            hidden_size=heads * self.head_dim if is_gpt2 else self.hidden,
            num_layers=self.layers,
            heads=heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim if is_gpt2 else 2 * self.head_dim,
            ffn_hidden=self.ffn,
            max_positions=16,
            norm_eps=1e-5,
            tied=self.tied,
            init_std=0.2,
            dropouts=Dropouts(self.dropout, self.dropout, self.dropout),
            qkv_bias=self.biases or is_gpt2,
            out_bias=self.biases or is_gpt2,
            mlp_bias=self.biases or is_gpt2,
            rope_theta=0.0 if is_gpt2 else 100.0,
        )

    def batch(self) -> Batch:
        """Random sequences; about one target in eight doesn't count."""
        random = np.random.default_rng(7)
        tokens, targets = random.integers(0, self.vocab, (2, sum(self.lengths)))
        targets[1:][random.random(len(targets) - 1) < 0.125] = -1
        state = DropoutState(3, 1) if self.dropout else None
        return Batch(tokens, Rows.of(self.lengths), targets, state)


def equals_one_rank(case: Case) -> None:
    """In float64: logits, loss, gradient norm and every gradient."""
    expected = run_threads(1, forward_backward, case, "float64", 0)[0]
    for found in run_threads(case.ranks, forward_backward, case, "float64", 0):
        assert_close(found, expected, 1e-10)


def is_invariant(case: Case) -> None:
    """In float32 with so many blocks: the same bits, weights after two optimizer steps and decoded logits included."""
    expected = run_threads(1, whole_run, case)[0]
    for found in run_threads(min(case.ranks, case.blocks), whole_run, case):
        assert_same_bits(found, expected)


def check(promise: Callable[[Case], None], case: Case) -> None:
    """Hold a case to a promise; a failure says by which command to see it again."""
    try:
        promise(case)
    except BaseException as error:
        code = f"from tests.property.layouts import *; {promise.__name__}({case!r})"
        error.add_note(f"to see it again: OPENBLAS_NUM_THREADS=1 PYTHONPATH=. python -c {code!r}")
        raise


def make_model(group: Group, case: Case, dtype: str, blocks: int) -> CausalLM:
    """The case's model, every parameter random."""
    own = case.weights[: group.size] if group.size > 1 else ()  # the invariant mode has no more ranks than blocks
    mesh = make_mesh(group, weights={"tp": own} if any(own) else {})
    model = build_model(case.config(), make_site(mesh, dtype=dtype, invariant_blocks=blocks))
    fill(model.named_params(), std=0.3)
    return model


def forward_backward(group: Group, case: Case, dtype: str, blocks: int) -> Arrays:
    """One pass, as global arrays on every rank."""
    model, batch = make_model(group, case, dtype, blocks), case.batch()
    logits, _ = model.forward(batch)
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()))
    result: Arrays = {"logits": model.gather_logits(logits), "loss": step.accumulate([batch])[0]}
    result["norm"] = step.grad_norm()
    return result | {f"grad {name}": grad for name, grad in gradients(group, model.named_params()).items()}


def whole_run(group: Group, case: Case) -> Arrays:
    """An invariant pass, two optimizer steps, and the logits of a few tokens decoded one by one."""
    result = forward_backward(group, case, "float32", case.blocks)
    model = make_model(group, case, "float32", case.blocks)
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()), clip_norm=0.5)
    for i in range(2):
        done = step([case.batch()], 1e-2)
        result[f"step {i}"] = np.array([done.loss, done.grad_norm])
    result |= {f"weight {name}": weight for name, weight in weights(group, model.named_params()).items()}
    caches = model.new_caches([4])
    for past in range(3):
        result[f"decoded {past}"] = model.next_logits(Batch.of_lists([[past % case.vocab]], (past,)), caches)
    return result
