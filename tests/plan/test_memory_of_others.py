"""The formulas of `mpitp plan memory` are what runs of encoders, vision transformers and encoder-decoders hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.config import RunConfig, run_config_from
from mpitp.plan.memory_command import run_memory
from tests.models.encoder_files import TINY_BERT
from tests.plan.test_memory import measured
from tests.train.test_image_task import MODEL as VIT
from tests.train.test_image_task import images
from tests.train.test_pair_task import BART, T5

LENGTH = 16
BERT = {key: value for key, value in TINY_BERT.items() if key not in ("vocab_size", "architectures")}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("classification", {**BERT, "hidden_size": 24}),
    "vit": ("image", VIT),
    "t5": ("translation", T5),
    "bart": ("translation", BART),
}
LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bert", {}),
    (3, "bert", {"train_recompute": "full"}),
    (1, "vit", {"model_dtype": "float32"}),
    (2, "vit", {}),
    (1, "t5", {}),
    (2, "t5", {"train_recompute": "full"}),
    (4, "bart", {"mesh_dp": 2, "optim_zero": 2}),
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
