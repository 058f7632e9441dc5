"""Recomputing layers change no bit, keep little, and look from outside like the layers that they wrap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import to_host
from mpitp.checkpoint.load import ModelSource
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import ConfigError
from mpitp.layers.layer import walk
from mpitp.layers.passes import DropoutState, Pass
from mpitp.layers.recompute import Recompute
from mpitp.layers.site import make_site
from mpitp.models import CausalLM
from mpitp.models.registry import recompute_blocks
from mpitp.step.contents import arrays_in
from mpitp.step.record import record_pass
from mpitp.trace.timeline import finish
from mpitp.trace.tracer import Tracer
from mpitp.train.step import TrainStep
from mpitp.verify.compare import EXACT
from mpitp.verify.run import Settings, verify
from tests.models.model_cases import CONFIGS, make_batch, make_model, make_optimizer
from tests.sharded import StrictDevice
from tests.train.layouts import check_layout
from tests.train.run_case import config, make_data

WISHES = ["attention", "full", "every:2"]
DROPOUT = DropoutState(3, 1)


def passes(group: Group, name: str, wish: str, **options: Any) -> dict[str, Any]:
    """Loss and gradients of two microbatches, the second's forward before the first's backward."""
    model = recompute_blocks(make_model(group, CONFIGS[name], "float32", **options), wish)
    batches = [make_batch(model.config, 2, DROPOUT, first) for first in (0, 2)]
    losses, ctxs = zip(*(model.loss_forward(batch) for batch in batches), strict=True)
    for ctx in ctxs:
        model.loss_backward(ctx, 0.1)
    return {"losses": np.array(losses)} | {n: to_host(p.grad) for n, p in model.named_params()}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("name", ["gpt2", "llama biases, tied, 5/1, llama3"])
def test_no_bit_changes(name: str, wish: str, ranks: int) -> None:
    """With dropout, on any ranks, whatever order the microbatches go back in."""
    plain, again = (run_threads(ranks, passes, name, each) for each in ("none", wish))
    for ours, theirs in zip(again, plain, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("options", [{"device": StrictDevice()}, {"sequence_parallel": True}], ids=["strict", "sp"])
def test_no_bit_changes_on_a_device_or_on_token_shards(options: dict[str, Any]) -> None:
    def both(group: Group) -> list[dict[str, Any]]:
        return [passes(group, "gpt2", wish, **options) for wish in ("none", "full")]

    for plain, again in run_threads(2, both):
        assert all(np.array_equal(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("wish", WISHES)
def test_a_run_is_the_same_to_the_bit_in_the_invariant_mode(wish: str) -> None:
    check_layout(3, {"tp": 3}, {"train_recompute": wish}, tolerance=0, train_invariant=True)


def held_bytes(model: CausalLM) -> int:
    """Bytes of the distinct arrays that a forward pass leaves, without the loss's own."""
    _, ctx = model.forward(make_batch(model.config, 3))
    owners = {}
    for array in arrays_in(ctx):
        while isinstance(array.base, np.ndarray):
            array = array.base
        owners[id(array)] = array.nbytes
    return sum(owners.values())


def test_what_is_kept_is_the_input_of_each_block() -> None:
    wishes = ("none", "every:2", "attention", "full")
    kept = {wish: held_bytes(recompute_blocks(make_model(SerialGroup(), CONFIGS["gpt2"]), wish)) for wish in wishes}
    assert kept["full"] < kept["every:2"] < kept["none"] and kept["full"] < kept["attention"] < kept["none"]


def test_names_types_and_wrapped_layers_are_those_of_the_plain_model() -> None:
    plain = make_model(SerialGroup(), CONFIGS["gpt2"])
    again = recompute_blocks(make_model(SerialGroup(), CONFIGS["gpt2"]), "full")
    assert [name for name, _ in again.named_params()] == [name for name, _ in plain.named_params()]
    assert [(n, type(x)) for n, x in walk(again.layers)] == [(n, type(x)) for n, x in walk(plain.layers)]
    assert [str(typed.outgoing) for typed in again.types().values()] == [
        str(typed.outgoing) for typed in plain.types().values()
    ]
    assert type(again.layers["blocks.0"]) is Recompute and type(again["blocks.0"]) is type(plain["blocks.0"])


@pytest.mark.parametrize("wish", WISHES)
def test_verify_trace_and_step_look_inside(wish: str, tmp_path: Path) -> None:
    source = ModelSource(CONFIGS["gpt2"], seed=1, recompute=wish)

    def look(group: Group) -> tuple[bool, list[str], int]:
        exact = make_site(group, dtype="float64", invariant_blocks=5)
        report = verify(exact, source.make, make_batch(source.config, 2, DROPOUT), Settings(EXACT))
        tracer = Tracer()
        model = source.make(make_site(tracer.watch(group)))
        step = TrainStep(model, make_optimizer(model))
        tracer.attach(model)
        step([make_batch(model.config, 2), make_batch(model.config, 1)], 1e-3)
        trace = finish(tracer, group, tmp_path / "trace.json", "train")
        wrong = [row.place for row in trace.ledger if not row.is_expected] if trace else []
        ops = record_pass(group, source.make, make_batch(source.config, 2))
        return report.ok, wrong, sum(op.telling.layer.startswith("blocks.0.attention.qkv") for op in ops)

    plain = run_threads(2, lambda g: record_pass(g, ModelSource(CONFIGS["gpt2"]).make, make_batch(CONFIGS["gpt2"], 2)))
    own = sum(op.telling.layer.startswith("blocks.0.attention.qkv") for op in plain[0])
    for ok, wrong, ops in run_threads(2, look):
        assert ok and wrong == [] and ops > own  # the operations that come again are shown


class Forgetful(Recompute):
    """Planted: runs forward again without dropout."""

    def backward(self, dy: Any, ctx: Any) -> Any:
        _, inner = self.inner.forward(ctx.x, Pass(ctx.run.rows))
        return self.inner.backward(dy, inner)


def test_a_rerun_of_another_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recompute, "backward", Forgetful.backward)
    plain, again = (passes(SerialGroup(), "gpt2", wish) for wish in ("none", "full"))
    assert not np.allclose(plain["blocks.0.mlp.up.weight"], again["blocks.0.mlp.up.weight"], rtol=1e-3)


def test_wishes_that_are_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    for wish in ("all", "every:0", "every:", "every:2.5", ""):
        with pytest.raises(ConfigError, match="train.recompute"):
            config(data, tmp_path / "run", train_recompute=wish)
