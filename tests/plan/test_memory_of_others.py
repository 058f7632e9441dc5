"""The formulas of `mpitp plan memory` are what runs of encoders, vision transformers and encoder-decoders hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.config import RunConfig, run_config_from
from mpitp.plan.memory_command import run_memory
from tests.models.encoder_files import TINY_BERT
from tests.plan.test_memory import measured
from tests.train.kinds_case import data_of
from tests.train.run_case import write_run_file
from tests.train.test_image_task import MODEL as VIT
from tests.train.test_image_task import images
from tests.train.test_pair_task import BART, T5

LENGTH = 16
BERT = {key: value for key, value in TINY_BERT.items() if key not in ("vocab_size", "architectures")}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("classification", {**BERT, "hidden_size": 24}),
    "masked": ("masked", {**BERT, "hidden_size": 24}),
    "vit": ("image", VIT),
    "t5": ("translation", T5),
    "bart": ("translation", BART),
}
STAGES = {"mesh_pp": 2, "model_decoder_layers": 3}
LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bert", {}),
    (3, "bert", {"train_recompute": "full"}),
    (1, "vit", {"model_dtype": "float32"}),
    (2, "vit", {}),
    (1, "t5", {}),
    (2, "t5", {"train_recompute": "full"}),
    (4, "bart", {"mesh_dp": 2, "optim_zero": 2}),
    (3, "bert", {"mesh_cp": 3}),
    (2, "bert", {"mesh_cp": 2, "mesh_cp_form": "heads", "train_recompute": "attention"}),
    (2, "masked", {"mesh_sequence_parallel": True}),
    (4, "masked", {"mesh_pp": 2, "mesh_sequence_parallel": True}),
    (2, "masked", {"mesh_pp": 2, "mesh_schedule": "zb"}),
    (3, "vit", {"mesh_sequence_parallel": True}),
    (2, "vit", {"mesh_cp": 2}),
    (2, "vit", {"mesh_pp": 2, "mesh_schedule": "gpipe"}),
    (2, "t5", {"mesh_sequence_parallel": True}),
    (2, "t5", {"mesh_pp": 2}),
    (2, "t5", {"mesh_cp": 2}),
    (3, "t5", {"mesh_pp": 3, "mesh_schedule": "zb"}),
    (4, "bart", {**STAGES, "mesh_sequence_parallel": True, "mesh_schedule": "interleaved"}),
]


def config_of(folder: Path, kind: str, changes: dict[str, Any]) -> RunConfig:
    """Every text longer than what is read of it."""
    task, model = MODELS[kind]
    text = "abc " * LENGTH
    lines = {"classification": f"{{}}\t{text}\n", "translation": f"{text}\t{{}} {text}\n"}
    data: dict[str, Any] = {"tokenizer": "bytes", "seq_len": LENGTH, "train": str(folder / "train.tsv")}
    if task == "image":
        np.savez(folder / "train.npz", **dict(zip(("images", "labels"), images(8, 1), strict=True)))
        data = {"train": str(folder / "train.npz")}
    elif task == "masked":
        data = {**data_of("masked"), "seq_len": LENGTH}
    else:
        (folder / "train.tsv").write_text("".join(lines[task].format("ab"[i % 2]) for i in range(8)))
    tables: dict[str, Any] = {
        "model": dict(model),
        "task": {"kind": task},
        "data": data,
        "train": {"steps": 1, "micro_batch_size": 2, "global_batch_size": 8, "run_dir": str(folder / "run")},
        "optim": {"bucket_mib": 0.05},
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        tables.setdefault(section, {})[name] = value
    return run_config_from(tables)


@pytest.mark.parametrize(("ranks", "kind", "changes"), LAYOUTS, ids=str)
def test_formulas_are_what_a_run_holds(
    ranks: int, kind: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, kind, changes)
    foreseen = run_memory(config, ranks)
    for memory, found in zip(foreseen, measured(config, ranks, monkeypatch), strict=True):
        assert {name: getattr(memory, name) for name in found} == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("simulate", "simulate knows models that continue or translate text.* 'image' trains another kind"),
        ("search", "'image': set .mesh. yourself; plan memory tells"),
    ],
)
def test_other_questions_say_what_is_known(
    question: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {
        "model": VIT,
        "task": {"kind": "image"},
        "data": {"train": str(tmp_path / "none.npz")},
        "train": {"steps": 1, "run_dir": str(tmp_path / "run")},
    }
    path = str(write_run_file(tmp_path / "run.toml", tables))
    words = [question, path, "--machine", "examples/machines/ethernet_cpu.toml", "--ranks", "2"]
    assert main(["plan", *words]) == 3
    assert re.search(said, capsys.readouterr().err, re.DOTALL)
