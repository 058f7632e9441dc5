"""The cost of a layout: memory as `plan memory` tells it for the same run, and parts that add up as they must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpitp.pipeline.schedules import make_schedule
from mpitp.pipeline.simulate import Durations, simulate
from mpitp.plan.cost import Step, cost_of, pipeline_form, pipeline_seconds
from mpitp.plan.layout import Layout, layout_of
from mpitp.plan.machine_file import AttentionSection
from mpitp.plan.memory_command import run_memory
from mpitp.plan.work import Scores, Work
from tests.plan.cases import anatomy_of, machine, run_of

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
    (4, "moe", {"mesh.dp": 2, "mesh.sequence_parallel": True, "optim.zero": 1}),
    (3, "moe", {"mesh.pp": 3, "train.recompute": "full"}),
    (4, "moe", {"mesh.cp": 2}),
    (4, "moe", {"mesh.ep": 4}),
    (8, "moe", {"mesh.ep": 2, "mesh.dp": 2, "mesh.sequence_parallel": True, "optim.zero": 1}),
    (6, "moe", {"mesh.ep": 3, "mesh.cp": 2, "optim.zero": 2, "model.dtype": "bfloat16"}),
    (4, "moe", {"mesh.ep": 2, "mesh.pp": 2, "mesh.schedule": "zb"}),
    (6, "moe", {"mesh.ep": 2, "mesh.dp": 3, "optim.zero": 3, "train.recompute": "full"}),
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


def test_attention_at_the_rate_that_was_measured_or_in_its_parts() -> None:
    """4 blocks of 6 heads of width 8 over 24 sequences of 16 tokens, whose tile has 16 x 16 elements."""
    config = run_of("gpt2", {})
    rows = ((16.0, 8.0, 1e6, 4e5), (64.0, 8.0, 1e7, 1e7))
    told = replace(machine(), attention=AttentionSection(float32=rows))
    elements = 24 * 4 * 6 * 16 * 16
    found = cost_of(anatomy_of(config, told), Step(24), Layout(micro=2)).parts
    assert found["attention"] == pytest.approx(elements * (1 / 1e6 + 1 / 4e5))
    in_parts = cost_of(anatomy_of(config), Step(24), Layout(micro=2)).parts
    assert in_parts["attention"] == 0 and in_parts["products"] > found["products"]
    assert in_parts["starts"] > found["starts"] and in_parts["exponentials"] > found["exponentials"]
    scores = Scores(16, 8, 256.0, 1.0, (16, 16))
    assert Work(scores=(scores,)).flops == 2 * 2 * 256 * 8
    assert Work(scores=(replace(scores, is_backward=True),)).flops == 5 * 2 * 256 * 8


def test_a_table_that_two_stages_have_is_summed_by_a_message() -> None:
    """301 rows of 48 floats; Llama's head has its own where `tie_word_embeddings` says so."""
    layout, on = Layout(pp=2, micro=2), machine()
    tied = cost_of(anatomy_of(run_of("gpt2", {})), Step(24), layout).parts["tied tables"]
    assert tied == pytest.approx(on.send(301 * 48 * 4, is_wide=False))
    assert cost_of(anatomy_of(run_of("gpt2", {})), Step(24), Layout(micro=2)).parts["tied tables"] == 0
    untied = run_of("llama", {"model.tie_word_embeddings": False})
    assert cost_of(anatomy_of(untied), Step(24), layout).parts["tied tables"] == 0
    alone, two = (cost_of(anatomy_of(untied), Step(24), each).parts["start of the step"] for each in (Layout(), layout))
    assert alone == on.compute.step_seconds and two > alone + 3 * on.in_node.latency_seconds


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb", 1), ("interleaved", 3)])
@pytest.mark.parametrize("stages", [2, 3, 8])
def test_the_closed_form_of_a_pipelines_length(schedule: str, chunks: int, stages: int) -> None:
    even = Durations(1.0, 1.1, 0.9)
    uneven = [Durations(1.0 + 0.2 * (s % 2), 1.1, 0.9 + 0.3 * (s == 1), 0.05 / chunks) for s in range(stages)]
    for count in (stages, 2 * stages, 6 * stages):
        lists = make_schedule(schedule, stages, count, chunks)
        assert pipeline_form(schedule, chunks, count, [even] * stages) == pytest.approx(simulate(lists, even).length)
        whole = simulate(lists, uneven).length
        assert pipeline_seconds(schedule, chunks, count, uneven) == whole
        assert pipeline_form(schedule, chunks, count, uneven) == pytest.approx(whole, rel=0.1)
