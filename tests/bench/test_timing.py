"""Turns, ratios, and the stopwatch's arithmetic."""

from __future__ import annotations

import sys

import pytest

from mpitp.bench.profile import WATCHED, Stopwatch, watch_functions
from mpitp.bench.timing import Samples, say_progress, take_turns
from mpitp.comm import SerialGroup


def test_tasks_take_turns_and_the_first_round_is_not_recorded() -> None:
    order: list[str] = []
    times = iter(range(100))

    def task(name: str) -> float:
        order.append(name)
        return float(next(times))

    samples = take_turns({"a": lambda: task("a"), "b": lambda: task("b")}, 2, SerialGroup())
    assert order == ["a", "b"] * 3
    assert samples.seconds == {"a": [2.0, 4.0], "b": [3.0, 5.0]}


def test_ratios() -> None:
    samples = Samples({"step": [4.0, 9.0, 6.0], "x": [1.0, 2.0, 3.0], "y": [1.0, 1.0, 0.0]})
    assert samples.least("x", "y") == 1.0
    assert samples.median("x", "y") == 3.0
    assert samples.ratio("step", "x", "y") == (4.0, 2.0)


def test_a_stopwatch_counts_inner_time_once() -> None:
    now = iter([0.0, 1.0, 3.0, 10.0])
    watch = Stopwatch(lambda: next(now))
    inner = watch.watch("inner", lambda: None)
    watch.watch("outer", inner)()
    assert watch.seconds == {"inner": 2.0, "outer": 8.0}


def test_watched_functions_are_restored() -> None:
    from importlib import import_module

    def all_watched() -> list[object]:
        return [
            getattr(import_module(module), name)
            for module, categories in WATCHED.items()
            for names in categories.values()
            for name in names
        ]

    before = all_watched()
    with pytest.raises(ZeroDivisionError), watch_functions(Stopwatch()):
        assert all(now is not then for now, then in zip(all_watched(), before, strict=True))
        raise ZeroDivisionError
    assert all_watched() == before


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_progress(SerialGroup(), "round 1 of 2")
    monkeypatch.setattr(sys, "stderr", None)  # closed
    say_progress(SerialGroup(), "round 2 of 2")
    assert capsys.readouterr().out == ""
