"""`mpitp verify --config` over all axes: every layout equals one rank, and its types are those of the run file."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mpitp.cli import main
from tests.command_on_threads import command_on_threads
from tests.models.model_cases import RAW
from tests.train.run_case import make_data, tables, write_run_file

Keys = dict[str, Any]

LAYOUTS: list[tuple[str, Keys]] = [
    ("gpt2", {"mesh.dp": 2, "mesh.tp": 2, "mesh.sequence_parallel": True}),
    ("llama 9/3", {"mesh.dp": 2, "mesh.tp": 2, "optim.zero": 2}),
    ("llama 7/7", {"mesh.cp": 2, "mesh.tp": 2, "mesh.sequence_parallel": True}),
    ("gpt2", {"mesh.pp": 2, "mesh.tp": 2, "mesh.sequence_parallel": True, "mesh.schedule": "zb"}),
    ("llama 9/3", {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 1, "train.recompute": "full", "optim.zero": 1}),
    ("llama 9/3", {"mesh.dp": 2, "mesh.tp": 2, "mesh.shares.dp": [1, 3], "mesh.shares.tp": [2, 1]}),
    ("gpt2", {"mesh.pp": 2, "mesh.tp": 3, "mesh.shares.tp": [1, 0, 4], "mesh.shares.pp": [3, 1]}),
    ("gpt2 untied", {"mesh.dp": 2, "mesh.cp": 3, "mesh.tp": 1, "mesh.cp_form": "heads", "optim.zero": 3}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def run_file(folder: Path, data: Path, model: str) -> str:
    """A run of six microbatches a step."""
    content = tables(data, folder / "run", train_global_batch_size=6, train_micro_batch_size=1)
    left_out = ("vocab_size", "eos_token_id")
    content["model"] = {k: v for k, v in RAW[model].items() if k not in left_out and v is not None}
    del content["data"]["valid"], content["train"]["eval_every"]
    return str(write_run_file(folder / "run.toml", content))


def words_of(layout: Keys) -> list[str]:
    return [word for key, value in layout.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def ranks_of(layout: Keys) -> int:
    return prod(layout.get(f"mesh.{axis}", 1) for axis in ("pp", "dp", "cp", "tp"))


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_every_layout_equals_one_rank(
    model: str, layout: Keys, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", run_file(tmp_path, data, model), *words_of(layout), "--dtype", "float64", "--steps", "2"]
    codes = command_on_threads(ranks_of(layout), "verify", *words, "--finite-differences", "3", "--failures-only")
    print(*capsys.readouterr(), sep="\n")
    assert codes == [0] * ranks_of(layout)


def test_types_know_the_axes_of_the_run_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = {"mesh.pp": 2, "mesh.dp": 2, "mesh.cp": 2, "mesh.tp": 8, "mesh.sequence_parallel": True}
    words = ["verify", "--types", "--config", run_file(tmp_path, data, "gpt2"), *words_of(layout), "--ranks", "64"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "V along dp, V along cp, V along tp" in printed and "on 64 ranks" in printed
    assert "embedding" in printed and "head" in printed and "loss" in printed  # of all stages
