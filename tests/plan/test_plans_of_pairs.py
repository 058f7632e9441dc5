"""Cost, search and simulation of encoder-decoders: memory as `plan memory` tells it, and what is true of all models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitp.cli import main
from mpitp.plan.anatomy import Anatomy, Facts
from mpitp.plan.choice import planned_model
from mpitp.plan.cost import Step, cost_of
from mpitp.plan.layout import Layout, layout_of
from mpitp.plan.memory_command import run_memory
from mpitp.plan.search import Problem, explore, search
from mpitp.plan.simulate import StepSimulator, Troubles
from mpitp.plan.space import Units, layouts_of
from tests.plan.cases import machine
from tests.plan.test_memory_of_others import config_of
from tests.plan.test_search import all_estimates
from tests.train.run_case import write_run_file
from tests.train.test_pair_task import BART, T5

MACHINE = Path(__file__).parents[2] / "examples" / "machines" / "ethernet_cpu.toml"
STEP = Step(8, int(0.05 * 2**20))
LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "t5", {}),
    (2, "t5", {"train_recompute": "attention"}),
    (3, "t5", {"mesh_sequence_parallel": True, "train_recompute": "every:2"}),
    (2, "bart", {"mesh_dp": 2, "optim_zero": 3}),
    (4, "bart", {"mesh_dp": 2, "mesh_sequence_parallel": True, "optim_zero": 1}),
    (2, "t5", {"mesh_pp": 2, "train_recompute": "full"}),
    (4, "t5", {"mesh_pp": 4, "mesh_schedule": "zb", "train_micro_batch_size": 1}),
    (4, "t5", {"mesh_pp": 2, "mesh_schedule": "interleaved", "mesh_sequence_parallel": True}),
    (4, "bart", {"mesh_pp": 2, "mesh_dp": 2, "optim_zero": 2, "mesh_schedule": "gpipe"}),
]


def anatomy_of(folder: Path, kind: str, changes: dict[str, Any] | None = None) -> Anatomy:
    config = config_of(folder, kind, changes or {})
    return Anatomy(Facts(planned_model(config), config.model.dtype, config.data.seq_len), machine())


@pytest.mark.parametrize(("ranks", "kind", "changes"), LAYOUTS, ids=str)
def test_memory_is_that_of_the_rank_that_holds_most(
    ranks: int, kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(tmp_path, kind, changes)
    found = cost_of(anatomy_of(tmp_path, kind, changes), STEP, layout_of(config, ranks))
    told = {"mesh_stages": list(found.layout.stages)} if found.layout.stages else {}
    largest = max(run_memory(config_of(tmp_path, kind, changes | told), ranks), key=lambda memory: memory.total)
    assert found.memory.as_dict() == {name: largest.as_dict()[name] for name in found.memory.as_dict()}
    assert found.seconds == sum(found.parts.values()) and min(found.parts.values()) >= -1e-12


@pytest.mark.parametrize(("kind", "ranks"), [("t5", 4), ("bart", 3)])
def test_pruned_finds_what_trying_all_finds(kind: str, ranks: int, tmp_path: Path) -> None:
    anatomy = anatomy_of(tmp_path, kind)
    problem = Problem(anatomy, Units.of(anatomy.facts.model, 16, 8), STEP)
    every = all_estimates(problem, ranks)
    assert sorted(map(str, layouts_of(problem.units, ranks))) == sorted(str(one.layout) for one in every)
    assert {one.layout.cp for one in every} == {1} and {one.layout.pp for one in every} > {1}
    for limit in (math.inf, sorted(one.num_bytes for one in every)[len(every) // 4]):
        limited = replace(problem, limit=limit)
        order = sorted((one.seconds, one.num_bytes) for one in every if one.num_bytes <= limit)
        assert [(one.seconds, one.num_bytes) for one in explore(limited, ranks, 6).fastest] == order[:6]
    for one in every[::7]:
        cost = cost_of(anatomy, STEP, one.layout)
        assert one.num_bytes <= cost.memory.total
    assert search(problem, ranks, 1).best[0].seconds <= 1.05 * min(one.seconds for one in every)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=3), Layout(pp=3), Layout(pp=2, dp=2, schedule="zb")], ids=str)
def test_simulated_as_the_cost_says_where_nobody_shares_a_link(layout: Layout, tmp_path: Path) -> None:
    steps = StepSimulator(anatomy_of(tmp_path, "t5"), STEP, layout)
    assert steps.run().seconds == pytest.approx(cost_of(steps.anatomy, STEP, steps.layout).seconds, rel=5e-3)
    assert steps.run(Troubles({0: 2.0})).seconds > 1.2 * steps.run().seconds


@pytest.mark.parametrize(("model", "kind"), [(T5, "t5"), (BART, "bart")])
def test_the_commands_take_run_files_of_pairs(
    model: dict[str, Any], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables: dict[str, Any] = {
        "model": {**model, "vocab_size": 301, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
        "task": {"kind": "translation"},
        "data": {"train": str(tmp_path / "none.tsv"), "tokenizer": "bytes", "seq_len": 8},
        "mesh": {"pp": 2},
        "train": {"steps": 1, "run_dir": str(tmp_path / "run"), "global_batch_size": 8},
    }
    path, words = str(write_run_file(tmp_path / "run.toml", tables)), ["--machine", str(MACHINE), "--json"]
    assert main(["plan", path, "--ranks", "2", "--best", "2", "--compare", "cp=2", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["best"]) == 2 and "cp=2 is more than there are" in told["compared"][0]["refusal"]
    assert main(["plan", "simulate", path, "--ranks", "4", *words]) == 0
    assert json.loads(capsys.readouterr().out)["layout"].startswith("tp=2 pp=2")
    assert main(["plan", path, "--ranks", "2", "--set", "task.kind=masked", *words]) == 3


@pytest.mark.parametrize("question", ["graph", "simulate"])
def test_sources_that_are_cut_are_refused(question: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    tables = {
        "model": T5,
        "task": {"kind": "translation"},
        "data": {"train": str(tmp_path / "pairs.tsv"), "tokenizer": "bytes", "seq_len": 8},
        "train": {"steps": 1, "run_dir": str(tmp_path / "run"), "global_batch_size": 2},
        "mesh": {"cp": 2},
    }
    path = str(write_run_file(tmp_path / "run.toml", tables))
    words = ["--config", path] if question == "graph" else [path, "--machine", str(MACHINE)]
    assert main(["plan", question, *words, "--ranks", "2"]) == 3
    assert "doesn't know what mesh.cp=2 sends for the sources" in capsys.readouterr().err
