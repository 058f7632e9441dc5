"""`verify` of a pipeline: faults of stages, messages and halves of backward are found, and placed along pp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mpitp.comm import Group, SerialGroup, make_mesh, run_threads
from mpitp.layers.build import Builder
from mpitp.layers.passes import DropoutState
from mpitp.layers.site import Site, make_site
from mpitp.models import CausalLM, build_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.grad_norm import GradNorm
from mpitp.optim.reduction import make_reduction
from mpitp.pipeline import runner
from mpitp.pipeline.actions import Action, Message
from mpitp.pipeline.runner import PipelineRunner
from mpitp.train import step as step_module
from mpitp.train.step import TrainStep
from mpitp.verify.command import default_tolerance
from mpitp.verify.report import summary
from mpitp.verify.run import Report, Settings, verify
from tests.models.model_cases import make_batch
from tests.sharded import fill
from tests.verify.cases import CONFIGS

Plant = Callable[[pytest.MonkeyPatch], None]


def run_verify(model: str, mesh: dict[str, int], schedule: str) -> Report:
    """Rank 0's report on three microbatches and one step."""
    config = CONFIGS[model]
    batches = [make_batch(config, 1, DropoutState(5, 1), first=i, samples=[i]) for i in range(3)]

    def make(site: Site) -> CausalLM:
        made = build_model(config, site)
        fill(made.named_params(), std=0.2)
        return made

    def step(model: CausalLM, settings: AdamWSettings, clip_norm: float) -> TrainStep:
        reduction = make_reduction(model)
        passes = PipelineRunner(model, schedule, reduction)
        return TrainStep(model, AdamW(reduction.params, settings), clip_norm, None, passes, reduction)

    def run(group: Group) -> Report:
        settings = Settings(default_tolerance("float64", is_exact=False), steps=1)
        return verify(make_site(make_mesh(group, mesh), dtype="float64"), make, batches, settings, step)

    return run_threads(mesh["pp"] * mesh.get("tp", 1), run)[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
@pytest.mark.parametrize("model", CONFIGS)
def test_without_a_fault_all_is_equal(model: str, schedule: str) -> None:
    report = run_verify(model, {"pp": 2, "tp": 2}, schedule)
    assert report.ok, summary(report, [], 4)


def tied_gradient_summed_on_one_stage(patch: pytest.MonkeyPatch) -> None:
    def add(param: Any, group: Group, holders: Sequence[int]) -> None:
        (other,) = (stage for stage in holders if stage != group.rank)
        sent = group.start_send(param.grad, other, runner.TIED_TAG)
        theirs = group.recv(param.grad, other, runner.TIED_TAG)
        param.grad = param.grad + theirs if group.rank == 0 else param.grad
        sent.wait()

    patch.setattr(runner, "_add_others", add)


def tied_gradient_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner, "_add_others", lambda param, group, holders: None)


def received_for_another_microbatch(patch: pytest.MonkeyPatch) -> None:
    """What comes for microbatch 0 is taken for 1, and the other way round, on the way forward."""
    right = runner.receive_before

    def wrong(action: Action, stage: int, grid: Any) -> Message | None:
        is_swapped = action.kind == "F" and action.microbatch < 2
        return right(replace(action, microbatch=1 - action.microbatch) if is_swapped else action, stage, grid)

    patch.setattr(runner, "receive_before", wrong)


def gradient_sent_for_another_microbatch(patch: pytest.MonkeyPatch) -> None:
    right = runner.send_after

    def wrong(action: Action, stage: int, grid: Any) -> Message | None:
        is_swapped = action.kind != "F" and action.microbatch < 2
        return right(replace(action, microbatch=1 - action.microbatch) if is_swapped else action, stage, grid)

    patch.setattr(runner, "send_after", wrong)


def norm_counted_on_one_stage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_module, "GradNorm", lambda params, group: GradNorm(params, SerialGroup()))


def weight_gradients_left_out(patch: pytest.MonkeyPatch) -> None:
    """The second half of the last microbatch's backward is never done."""
    right = runner._Walk._weight_grad

    def wrong(walk: runner._Walk, action: Action) -> None:
        if action.microbatch < 2:
            right(walk, action)

    patch.setattr(runner._Walk, "_weight_grad", wrong)


def masks_of_the_first_microbatch(patch: pytest.MonkeyPatch) -> None:
    """A stage makes one pass, with its samples' masks, and takes it for all microbatches."""
    right = CausalLM.new_pass

    def wrong(model: CausalLM, batch: Any, *others: Any) -> Any:
        first = getattr(model, "first_pass", None) or right(model, batch, *others)
        model.first_pass = first  # type: ignore[attr-defined]
        return first

    patch.setattr(CausalLM, "new_pass", wrong)


def replica_of_the_table_is_counted(patch: pytest.MonkeyPatch) -> None:
    right = Builder.vocab_table
    patch.setattr(Builder, "vocab_table", lambda build, vocab, hidden, **_: right(build, vocab, hidden))


FAULTS: list[tuple[Plant, str, str, str, str]] = [  # what, model, kind and place of what is seen first, axis
    (tied_gradient_summed_on_one_stage, "gpt2", "grad", "embedding.weight", "pp: ranks that should be equal"),
    (tied_gradient_not_summed, "gpt2", "grad", "embedding.weight", "pp: each rank has a summand; nobody sums it"),
    (received_for_another_microbatch, "llama", "y", "blocks.1.norm1", ""),
    (gradient_sent_for_another_microbatch, "llama", "dx", "blocks.0.dropout2", ""),
    (norm_counted_on_one_stage, "llama", "value", "gradient norm", ""),
    (weight_gradients_left_out, "llama", "grad", "embedding.weight", ""),
    (masks_of_the_first_microbatch, "gpt2", "y", "embedding", ""),
]


@pytest.mark.parametrize(
    ("plant", "model", "kind", "place", "axis"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_fault_is_found_and_placed(
    plant: Plant, model: str, kind: str, place: str, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = run_verify(model, {"pp": 2}, "zb")
    first = report.first(kind)
    assert first is not None and first.name == place, summary(report, [], 2)
    assert first.axis.startswith(axis), first.axis


def test_a_table_that_two_stages_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    replica_of_the_table_is_counted(monkeypatch)
    with pytest.raises(AssertionError, match="a block is owned by two ranks"):
        run_verify("gpt2", {"pp": 2}, "1f1b")
