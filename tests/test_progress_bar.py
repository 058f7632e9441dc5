"""Without a terminal progress comes in whole lines, few of them; on one, and behind `mpitp launch` on one, as a bar."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from mpitp import progress_bar as module
from mpitp.progress_bar import Bar, Lines, progress_bar
from tests.launch.test_launch_faults import needs_mpiexec
from tests.train.run_case import make_data, tables, write_run_file


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


def lines(total: int | None = 1000, first: int = 0) -> tuple[Lines, io.StringIO]:
    stream = io.StringIO()
    return Lines(stream, "training", " steps", total, first, False), stream


def test_lines_are_whole_and_ever_rarer(clock: Clock) -> None:
    bar, stream = lines(100_000)
    told = []
    for second in range(1, 601):
        clock.now += 1
        bar.update(2)
        if len(stream.getvalue().splitlines()) > len(told):
            told.append(second)
    bar.close()
    assert told == [5, 10, 20, 40, 80, 140, 200, 260, 320, 380, 440, 500, 560]
    text = stream.getvalue()
    assert "\r" not in text and text.endswith("\n") and len(text.splitlines()) == len(told) + 1
    assert text.splitlines()[0] == "training:   0% 10/100000 steps [00:05<13:53:15,  2.00 steps/s]"


def test_last_state_is_told_once(clock: Clock) -> None:
    bar, stream = lines(10)
    bar.show({"loss": "2.5", "tokens_per_s": "77"})
    bar.update(9)
    clock.now += 5
    bar.update()
    assert stream.getvalue() == "training: 100% 10/10 steps [00:05<00:00,  2.00 steps/s, loss=2.5, tokens_per_s=77]\n"
    bar.close()
    assert len(stream.getvalue().splitlines()) == 1
    bar, stream = lines(10, first=10)
    bar.close()  # a resumed run that had nothing left to do
    assert stream.getvalue() == ""


def test_lines_of_a_run_that_goes_on_count_its_own_speed(clock: Clock) -> None:
    bar, stream = lines(1000, first=900)
    clock.now += 10
    bar.update(20)
    assert stream.getvalue().startswith("training:  92% 920/1000 steps [00:10<00:40,  2.00 steps/s")


def test_without_a_total_and_with_a_new_one(clock: Clock) -> None:
    bar, stream = lines(None)
    clock.now += 10
    bar.update(5)
    bar.reset(20)
    bar.update(20)
    bar.close()
    first, last = stream.getvalue().splitlines()
    assert first.startswith("training: 5 steps [00:10,") and last.startswith("training: 100% 20/20 steps")


def test_what_is_said_comes_between_the_lines(clock: Clock) -> None:
    bar, stream = lines(10)
    with bar:
        bar.update()
        bar.say("step 1: checkpoint")
        bar.update()
    assert [line[:12] for line in stream.getvalue().splitlines()] == ["step 1: chec", "training:  2"]


@pytest.mark.parametrize(("variable", "is_terminal", "kind"), [("0", False, Lines), ("1", False, Bar), ("", True, Bar)])
def test_kind(monkeypatch: pytest.MonkeyPatch, variable: str, is_terminal: bool, kind: type) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("MPITP_ON_TERMINAL", variable)
    with progress_bar("a", "b", 3) as bar:
        assert type(bar) is kind
        bar.show({"c": "d"})
        bar.update(3)
        bar.say("e")
    assert ("\r" in stream.getvalue()) == (kind is Bar) and "e\n" in stream.getvalue()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bar")
    settings = tables(make_data(folder), folder / "run", train_steps=30, train_eval_every=0, train_overwrite=True)
    return write_run_file(folder / "run.toml", settings)


def test_a_run_s_errors_in_a_file_are_a_few_whole_lines(run_file: Path) -> None:
    words = [sys.executable, "-m", "mpitp", "train", str(run_file)]
    done = subprocess.run(words, capture_output=True, timeout=100)
    assert done.returncode == 0 and b"\r" not in done.stderr
    told = done.stderr.decode().splitlines()
    assert len([line for line in told if line.startswith("training: ")]) <= 5
    assert max(map(len, told)) < 150 and told[-1].startswith("training: 100% 30/30 steps [")


@needs_mpiexec
@pytest.mark.parametrize("on_terminal", [False, True])
def test_launch_tells_its_ranks_of_its_terminal(run_file: Path, on_terminal: bool) -> None:
    words = [sys.executable, "-m", "mpitp", "launch", "-n", "2", "--", "train", str(run_file), "--set", "train.steps=3"]
    ours, its = pty.openpty() if on_terminal else os.pipe()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, stderr=its)
    os.close(its)
    told = b""
    try:
        while piece := os.read(ours, 1 << 16):
            told += piece
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert (b"3/3 [" in told) == on_terminal, told  # the bar's way to say it
    assert (b"100% 3/3 steps [" in told) == (not on_terminal), told
