"""A tiny run that resumes, is stopped and is damaged in the tests of this folder and of tests/mpi."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.device import CpuDevice
from mpitp.cli import main
from mpitp.comm import Group, run_threads
from mpitp.config import RunConfig, run_config_from
from mpitp.train.run import RunResult, train
from mpitp.train.stop import StopSignals
from tests.models.model_cases import GPT2

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows. "
MODEL = {key: value for key, value in GPT2.items() if key not in ("vocab_size", "eos_token_id")}  # 6 heads, dropout


def make_data(folder: Path) -> Path:
    """Prepared data with the parts `train` and `valid`."""
    (folder / "text").write_text(TEXT * 20)
    words = ["data", "prepare", str(folder / "text"), "--tokenizer", "bytes", "--out", str(folder / "data")]
    assert main([*words, "--valid-fraction", "0.1"]) == 0
    return folder / "data"


def tables(data: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """The run file as dictionaries; `changes` such as train_steps=5 replace keys, None leaves one out."""
    result: dict[str, Any] = {
        "model": dict(MODEL),
        "data": {"train": str(data / "train"), "valid": str(data / "valid"), "seq_len": 8, "valid_sequences": 3},
        "train": {"steps": 10, "global_batch_size": 4, "micro_batch_size": 2, "run_dir": str(run), "eval_every": 4},
        "optim": {"lr": 1e-2, "warmup_steps": 3},
        "checkpoint": {"every": 5, "keep": 3},
    }
    return changed(result, changes)


def changed(tables: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of a run file with other keys: {"train_steps": 5}; None leaves one out."""
    result = {section: dict(keys) for section, keys in tables.items()}
    for name, value in changes.items():
        section, _, key = name.partition("_")
        result.setdefault(section, {})[key] = value
    return {section: {k: v for k, v in keys.items() if v is not None} for section, keys in result.items()}


def config(data: Path, run: Path, **changes: Any) -> RunConfig:
    """The checked run file."""
    return run_config_from(tables(data, run, **changes))


def write_run_file(path: Path, content: Mapping[str, Mapping[str, Any]]) -> Path:
    """The dictionaries as a TOML file."""
    lines = []
    for section, keys in content.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(ranks: int, settings: RunConfig, **options: Any) -> RunResult:
    """The run on thread ranks; rank 0's result."""
    if "stop" not in options:
        options["stop"] = StopSignals(())

    def rank(group: Group) -> RunResult:
        return train(settings, group, CpuDevice(), **options)

    return run_threads(ranks, rank)[0]


def losses(run_dir: Path) -> list[tuple[Any, ...]]:
    """What metrics.jsonl says of each step, times left out."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timeless = ("seconds", "tokens_per_second")
    return [tuple((key, value) for key, value in line.items() if key not in timeless) for line in lines]


def numbers(run_dir: Path, *held_out: str) -> np.ndarray:
    """Losses, gradient norms, and what was held out last."""
    lines = [dict(line) for line in losses(run_dir)]
    last = [lines[-1][key] for key in held_out]
    return np.array([line["loss"] for line in lines] + [line["grad_norm"] for line in lines] + last)


def files(directory: Path, leave_out: Sequence[str] = ()) -> dict[str, bytes]:
    """Every file below a directory."""
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in leave_out}
