"""Pictures: refused in time where there can be none; each draws on axes what was measured."""

from __future__ import annotations

import errno
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from mpitp.backend.threads import limit_blas_threads
from mpitp.bench import allreduce, decode, plot, scaling, train
from mpitp.comm import SerialGroup
from mpitp.errors import FileError, UsageError
from tests.bench.test_command import DECODE, TRAIN, parsed
from tests.bench.test_scaling import WORDS

CASES = [
    ("train", train, TRAIN, "barh"),
    ("decode", decode, DECODE, "bar"),
    ("allreduce", allreduce, ["allreduce", "--max-bytes", "1024"], "loglog"),
    ("scaling", scaling, WORDS, "loglog"),
]


@pytest.mark.parametrize("what, program, words, call", CASES)
def test_each_benchmark_has_a_picture(what: str, program: Any, words: list[str], call: str) -> None:
    with limit_blas_threads(1):
        facts = program.measure(parsed(*words), SerialGroup())
    axes = MagicMock()
    plot.DRAWINGS[what](axes, facts)
    assert getattr(axes, call).called


def test_no_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--plot needs matplotlib.*mpitp\[plot\]"):
        plot.check_plot("out.png")


@pytest.mark.parametrize("name, message", [("nowhere/out.png", "no folder"), ("out.txt", r"\.png, \.svg or \.pdf")])
def test_no_picture_where_none_can_be_written(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    with pytest.raises(UsageError, match=message):
        plot.check_plot(str(tmp_path / name))


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws with matplotlib")
def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "out.svg"
    monkeypatch.setitem(plot.DRAWINGS, "train", lambda axes, facts: axes.plot([1, 2]))
    plot.draw("train", {}, str(place))
    before = place.read_bytes()
    assert b"<svg" in before

    def full_disk(self: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full_disk)
    with pytest.raises(FileError, match="No space left"):
        plot.draw("train", {}, str(place))
    assert place.read_bytes() == before and list(tmp_path.iterdir()) == [place]
