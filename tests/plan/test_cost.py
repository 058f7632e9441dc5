"""The cost of a layout: memory as `plan memory` tells it for the same run, and parts that add up as they must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpitp.pipeline.schedules import make_schedule
from mpitp.pipeline.simulate import Durations, simulate
from mpitp.plan.cost import Step, cost_of, least_pipeline_seconds, pipeline_seconds
from mpitp.plan.layout import Layout, layout_of
from mpitp.plan.memory_command import run_memory
from tests.plan.cases import anatomy_of, run_of

LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [  # ranks, model, changes of the run file
    (1, "gpt2", {}),
    (1, "gemma2", {"train.recompute": "attention"}),
    (4, "llama", {"train.recompute": "every:2"}),
    (3, "gpt2", {"mesh.sequence_parallel": True, "model.dtype": "bfloat16"}),
    (4, "llama", {"mesh.dp": 4}),
    (6, "gpt2", {"mesh.dp": 3, "optim.zero": 1, "model.dtype": "bfloat16"}),
    (4, "llama", {"mesh.dp": 2, "optim.zero": 2}),
    (4, "gemma2", {"mesh.dp": 4, "optim.zero": 3, "train.recompute": "full"}),
    (4, "llama", {"mesh.cp": 2}),
    (4, "llama", {"mesh.cp": 2, "mesh.cp_form": "heads", "optim.zero": 1}),
    (4, "gpt2", {"mesh.pp": 2}),
    (3, "llama", {"mesh.pp": 3, "mesh.schedule": "gpipe", "train.recompute": "full"}),
    (4, "llama", {"mesh.pp": 2, "mesh.schedule": "interleaved"}),
    (3, "gemma2", {"mesh.pp": 3, "mesh.schedule": "zb"}),
    (4, "gemma2", {"mesh.pp": 2, "mesh.dp": 2, "mesh.schedule": "zb", "optim.zero": 2}),
    (4, "gpt2", {"mesh.pp": 2, "mesh.dp": 2, "optim.zero": 3}),
]


@pytest.mark.parametrize(("ranks", "kind", "changes"), LAYOUTS, ids=str)
def test_memory_is_that_of_the_rank_that_holds_most(ranks: int, kind: str, changes: dict[str, Any]) -> None:
    config = run_of(kind, changes)
    found = cost_of(anatomy_of(config), Step(24, int(0.05 * 2**20)), layout_of(config, ranks))
    told = {"mesh.stages": found.layout.stages} if found.layout.stages else {}
    largest = max(run_memory(run_of(kind, changes | told), ranks), key=lambda memory: memory.total)
    assert found.memory.as_dict() == {name: largest.as_dict()[name] for name in found.memory.as_dict()}
    assert found.seconds == sum(found.parts.values()) and min(found.parts.values()) >= -1e-12
    assert found.limit in found.parts


def test_more_of_a_kind_costs_less_where_it_must() -> None:
    anatomy, step = anatomy_of(run_of("llama", {})), Step(24)
    one = cost_of(anatomy, step, Layout(micro=2))
    parts = one.parts
    assert parts["products"] > 0 and parts["bubble"] == pytest.approx(0) and parts["sums over tp"] == 0
    assert cost_of(anatomy, step, Layout(dp=3, micro=2)).parts["products"] == pytest.approx(parts["products"] / 3)
    assert cost_of(anatomy, step, Layout(tp=3, micro=2)).parts["sums over tp"] > 0
    again = cost_of(anatomy, step, Layout(micro=2, recompute="full"))
    assert again.parts["recompute"] > 0 and again.memory.activations < one.memory.activations
    assert {name: seconds for name, seconds in again.parts.items() if name != "recompute"} == pytest.approx(
        {name: seconds for name, seconds in parts.items() if name != "recompute"}
    )


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb", 1), ("interleaved", 3)])
@pytest.mark.parametrize("send", [0.0, 0.3])
def test_a_pipelines_length_is_the_simulated_one_and_above_its_bound(schedule: str, chunks: int, send: float) -> None:
    base = (Durations(1.0, 1.5, 0.8, send), Durations(1.2, 1.4, 0.9, send), Durations(0.7, 1.0, 1.3, send))
    for durations in (base, base[::-1], (base[0],) * 3):
        for count in (3, 6, 18, 60):
            whole = simulate(make_schedule(schedule, 3, count, chunks), durations).length
            close = pytest.approx(whole) if count < 32 else pytest.approx(whole, rel=0.005)  # by the pace from there on
            assert pipeline_seconds(schedule, chunks, count, tuple(durations)) == close
            assert least_pipeline_seconds(schedule, chunks, count, durations) <= whole * (1 + 1e-9)
    even = replace(base[0], send=0.0)
    if schedule in ("1f1b", "gpipe"):
        bound = least_pipeline_seconds(schedule, chunks, 9, [even] * 3)
        assert bound == pytest.approx(simulate(make_schedule(schedule, 3, 9), even).length)
