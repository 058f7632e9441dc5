"""`mpitp verify --config` of mixtures of experts: every layout equals one rank, auxiliary losses and routers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command_on_threads import command_on_threads
from tests.models.model_cases import MIXTURE_RAW
from tests.train.run_case import make_data, tables, write_run_file
from tests.verify.test_layouts import words_of

Keys = dict[str, Any]
SP = {"mesh.sequence_parallel": True}

LAYOUTS: list[tuple[str, int, Keys]] = [
    ("mixtral", 3, {"mesh.tp": 3, **SP}),
    ("mixtral", 2, {"mesh.ep": 2, "mesh.tp": 1}),
    ("mixtral", 7, {"mesh.ep": 7, "mesh.tp": 1}),  # more ranks than experts or microbatches
    ("mixtral", 4, {"mesh.cp": 2, "mesh.tp": 2, **SP}),
    ("mixtral", 4, {"mesh.pp": 2, "mesh.ep": 2, "mesh.tp": 1, "mesh.schedule": "zb"}),
    ("mixtral", 4, {"mesh.dp": 2, "mesh.ep": 2, "mesh.tp": 1, "optim.zero": 3}),
    ("qwen2_moe", 4, {"mesh.ep": 2, "mesh.tp": 2, **SP, "train.recompute": "full"}),
    ("qwen2_moe", 5, {"mesh.ep": 5, "mesh.tp": 1, "optim.zero": 1}),
    ("qwen2_moe", 6, {"mesh.ep": 3, "mesh.cp": 2, "mesh.tp": 1}),
    ("qwen2_moe", 3, {"mesh.pp": 3, "mesh.tp": 1, "mesh.schedule": "1f1b"}),
    ("qwen2_moe", 4, {"mesh.dp": 2, "mesh.tp": 2, "optim.zero": 2}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def run_file(folder: Path, data: Path, model: str, microbatches: int = 5) -> str:
    """A run of five microbatches a step: some rank has more than another."""
    content = tables(data, folder / "run", train_global_batch_size=microbatches, train_micro_batch_size=1)
    left_out = ("vocab_size", "eos_token_id")
    content["model"] = {k: v for k, v in MIXTURE_RAW[model].items() if k not in left_out and v is not None}
    del content["data"]["valid"], content["train"]["eval_every"]
    return str(write_run_file(folder / "run.toml", content))


@pytest.mark.parametrize(("model", "ranks", "layout"), LAYOUTS, ids=str)
def test_every_layout_equals_one_rank(
    model: str, ranks: int, layout: Keys, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", run_file(tmp_path, data, model), *words_of(layout), "--dtype", "float64", "--steps", "2"]
    codes = command_on_threads(ranks, "verify", *words, "--finite-differences", "5", "--failures-only")
    print(*capsys.readouterr(), sep="\n")
    assert codes == [0] * ranks
