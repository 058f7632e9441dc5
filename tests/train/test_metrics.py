"""The loss log: lines are whole, a full disk is one message, and a resumed run cuts it at its step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpitp.errors import FileError
from mpitp.train.log import truncate_metrics
from mpitp.train.metrics import Metrics

LINES = "".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 8))


@pytest.mark.parametrize(
    "tail",
    [
        "",
        '{"step": 8, "lo',
        '{"step": 5}\x00\x00\x00',
        "\x00" * 40,
        '{"step": "many"}\n[1]\n{"loss": 2}\n\n',
        '{"step": NaN}\n',
    ],
)
def test_cut_at_the_resumed_step(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (0, 5, 7, 9):
        path.write_text(LINES + tail)
        truncate_metrics(path, step)
        assert path.read_text() == "".join(LINES.splitlines(keepends=True)[:step])
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_bytes_that_are_no_text_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES.encode() + b"\xff\xfe{")
    truncate_metrics(path, 7)
    assert path.read_text() == LINES


def test_log_that_is_not_there_is_begun(tmp_path: Path) -> None:
    truncate_metrics(tmp_path / "metrics.jsonl", 3)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 3) as metrics:
        for step in (1, 2):
            metrics.log({"step": step})
            assert path.read_text().splitlines()[-1] == f'{{"step": {step}}}'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_is_one_message() -> None:
    with (
        pytest.raises(FileError, match="can't write /dev/full: No space left on device"),
        Metrics(Path("/dev/full"), 3) as m,
    ):
        m.log({"step": 1})


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="can't write .*: Is a directory"):
        Metrics(tmp_path, 3)
    with pytest.raises(FileError, match="can't write .*: No such file"):
        truncate_metrics(tmp_path / "nothing" / "metrics.jsonl", 3)
