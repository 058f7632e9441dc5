"""Signals become a flag and give way again; deadlines; what all ranks agree on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mpitp.comm import run_threads
from mpitp.config import duration_seconds, run_config_from
from mpitp.errors import ConfigError
from mpitp.train import stop as stop_module
from mpitp.train.stop import Deadline, StopSignals, agreed_reason, job_end_time


def deliver(name: str) -> None:
    """Send this process a signal, and return when its Python handler has run."""
    signal.raise_signal(signal.Signals[f"SIG{name}"])


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of these signals as they were."""
    names = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT]
    before = {name: signal.getsignal(name) for name in names}
    yield
    assert {name: signal.getsignal(name) for name in names} == before


def test_signal_sets_the_flag_and_the_handler_goes() -> None:
    with StopSignals(["USR1", "TERM"]) as stop:
        assert stop.received is None
        deliver("TERM")
        assert stop.received == "SIGTERM"
        deliver("USR1")
        assert stop.received == "SIGUSR1"


def test_programs_own_handler_is_called_and_comes_back() -> None:
    calls: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        with StopSignals(["USR1", "USR2"]) as stop:
            deliver("USR1")
            assert (stop.received, calls) == ("SIGUSR1", [signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is own
        deliver("USR1")
        assert calls == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_can_be_one_of_them() -> None:
    with StopSignals(["INT"]) as stop:
        deliver("INT")  # Python's own handler would raise KeyboardInterrupt
        assert stop.received == "SIGINT"


def test_ignored_signals_are_taken_over_and_ignored_again() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with StopSignals(["USR2"]) as stop:
            deliver("USR2")
            assert stop.received == "SIGUSR2"
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_off_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    seen = []

    def work() -> None:
        with StopSignals(["USR1"]) as stop:
            seen.append((stop.received, signal.getsignal(signal.SIGUSR1)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_a_handler_that_is_not_pythons_is_left_alone() -> None:
    code = """
import faulthandler, signal
from mpitp.train.stop import StopSignals
faulthandler.register(signal.SIGUSR1, chain=False)
with StopSignals(["USR1"]) as stop:
    signal.raise_signal(signal.SIGUSR1)
    print(stop.received, signal.getsignal(signal.SIGUSR1))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout) == (0, "None None\n") or "SIGUSR1" in done.stdout, done.stderr


def test_job_end_time() -> None:
    assert job_end_time({"SLURM_JOB_END_TIME": "1700000000"}, 1.6e9) == (1.7e9, "")
    assert job_end_time({}, 1.6e9) == (None, "")


@pytest.mark.parametrize("value", ["Unknown", "-5", "1.7e9", "9" * 400, " 1700000000"])
def test_an_odd_job_end_time_is_ignored_and_told(value: str) -> None:
    end, ignored = job_end_time({"SLURM_JOB_END_TIME": value}, 1.6e9)
    assert end is None and ignored == f"ignored: SLURM_JOB_END_TIME={value} is no time in seconds since 1970"


@pytest.mark.parametrize("value", ["0", "1000", "1699999999"])
def test_the_end_of_a_job_long_over_stops_nothing(value: str) -> None:
    end, ignored = job_end_time({"SLURM_JOB_END_TIME": value}, 1.7e9)
    assert end is None and ignored.endswith("has passed already")
    deadline = Deadline(None, {"SLURM_JOB_END_TIME": value})
    assert deadline.reason() is None and "has passed already" in deadline.ignored


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(stop_module.time, "time", lambda: now[0])
    return now


def test_stop_after(clock: list[float]) -> None:
    deadline = Deadline(100.0, {})
    clock[0] = 1099.9
    assert deadline.reason() is None
    clock[0] = 1100.0
    assert deadline.reason() == "train.stop_after has passed"
    assert Deadline(None, {}).reason() is None


def test_end_of_the_job_keeps_time_for_a_checkpoint(clock: list[float]) -> None:
    deadline = Deadline(None, {"SLURM_JOB_END_TIME": "2000"})
    clock[0] = 1939.0
    assert deadline.reason() is None
    clock[0] = 1940.0
    assert deadline.reason() == "the job ends in 60 s"
    deadline.slowest_step, deadline.slowest_save = 40.0, 90.0
    clock[0] = 1739.0
    assert deadline.reason() is None
    clock[0] = 1741.0
    assert deadline.reason() == "the job ends in 259 s"
    clock[0] = 2001.0
    assert deadline.reason() == "the job ends in 0 s"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_lowest_rank_with_a_reason_speaks(ranks: int) -> None:
    reasons = ["a", "b", None] if ranks == 3 else ["only"] * ranks

    def rank(group: Any) -> list[str | None]:
        return [agreed_reason(group, reasons[group.rank]), agreed_reason(group, None)]

    assert run_threads(ranks, rank) == [[reasons[0], None]] * ranks


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", None), ("90s", 90), ("1h50m", 6600), ("2d", 172800), ("0.5h", 1800), ("1d2h3m4.5s", 93784.5), ("120s", 120)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["5", "abc", "1h 5m", "-1s", "h", "1.h", "1w", "0s", "0h0m"])
def test_bad_durations_are_config_errors(text: str) -> None:
    tables = {
        "model": {"model_type": "gpt2"},
        "data": {"train": "d", "seq_len": 4},
        "train": {"steps": 1, "run_dir": "r", "stop_after": text},
    }
    with pytest.raises(ConfigError, match="train.stop_after = .*1h50m"):
        run_config_from(tables)


@pytest.mark.parametrize("names", [["USR7"], ["SIGTERM"], ["KILL"], ["STOP"], "TERM", [9]])
def test_bad_signals_are_config_errors(names: Any) -> None:
    tables = {
        "model": {"model_type": "gpt2"},
        "data": {"train": "d", "seq_len": 4},
        "train": {"steps": 1, "run_dir": "r", "signals": names},
    }
    with pytest.raises(ConfigError, match="train.signals"):
        run_config_from(tables)


def test_a_signal_while_a_rank_waits_is_seen_after_it() -> None:
    """The handler of a blocked main thread runs when the call returns: the flag, not the handler, ends the run."""
    with StopSignals(["USR1"]) as stop:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        time.sleep(0.2)
        timer.join()
        assert stop.received == "SIGUSR1"
