"""Peers in a Python of their own: what is asked and answered, and what is said when there is none."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.backend.threads import blas_threads, limit_blas_threads
from mpitp.bench import against, command, decode, train
from mpitp.bench.timing import Samples
from mpitp.comm import Group
from mpitp.errors import LaunchError, UsageError
from tests.bench.test_command import DECODE, TRAIN, parsed

PROGRAM = """
import json, sys, time
settings = json.loads(sys.argv[1])
print("noise")
print(json.dumps({"ready": "peer of " + settings["name"]}), flush=True)
for line in sys.stdin:
    if line.startswith("work") or settings["rank"] == 1 and line.startswith("wait"):
        time.sleep(1000)
    print(json.dumps({"seconds": 2.5, "heard": line.strip(), "rank": settings["rank"]}), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "peer.py").write_text(PROGRAM)
    monkeypatch.setattr(against, "PROGRAMS", tmp_path)
    return "peer.py"


def test_a_peer_answers_and_ends(program: str) -> None:
    peer = against.Peer(sys.executable, program, {"name": "two"}, 2)
    assert peer.version == "peer of two"
    assert peer.ask("step") == {"seconds": 2.5, "heard": "step", "rank": 0}
    peer.end()
    assert [process.returncode for process in peer._processes] == [0, 0]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_peer_takes_the_others_along(program: str, killed: int) -> None:
    peer = against.Peer(sys.executable, program, {"name": "two"}, 2)
    timer = threading.Timer(0.3, peer._processes[killed].kill)
    timer.start()
    started = time.monotonic()
    with pytest.raises(LaunchError, match="ended early"):
        peer.ask("work")
    assert time.monotonic() - started < 20
    assert [process.returncode for process in peer._processes] == [-9, -9]


def test_a_peer_that_does_not_end_is_ended(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "LEAVE_SECONDS", 0.5)
    peer = against.Peer(sys.executable, program, {"name": "two"}, 2)
    peer.ask("wait")  # rank 0 answers, rank 1 goes on
    peer.end()
    assert [process.returncode for process in peer._processes] == [0, -9]


def test_a_comparison_takes_one_thread_as_the_peer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
        threads.append(blas_threads())
        raise LaunchError("measured")

    monkeypatch.setattr(train, "measure", measure)
    np.ones((2, 2)) @ np.ones((2, 2))
    with limit_blas_threads(2), pytest.raises(LaunchError, match="measured"):
        command.run(parsed(*TRAIN, "--against", "torch", "--peer-python", sys.executable))
    assert threads == [1]


def test_a_peer_that_cannot_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers_decode.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(against, "PROGRAMS", tmp_path)
    with pytest.raises(LaunchError, match="ended early.*needs transformers and torch"):
        against.Peer(sys.executable, "transformers_decode.py", {})
    with pytest.raises(LaunchError, match=f"can't start {tmp_path}/none/python"):
        against.Peer(f"{tmp_path}/none/python", "torch_train.py", {})


def test_comparison() -> None:
    samples = Samples({"step": [1.0, 3.0], "torch, functions": [2.0, 3.0], "square": [1.0, 1.0]})
    found = against.comparison(samples, 10, "2.0")
    form = {"tokens_per_second": {"best": 5.0, "median": 4.0}, "ours_is_times": {"least": 2.0, "median": 1.5}}
    assert found == {"torch": "2.0", "forms": {"functions": form}}
    assert "2.00 times as fast" in against.comparison_lines({"against": found})[-1]


def test_comparison_of_generation() -> None:
    samples = Samples({"batch 2": [1.0, 2.0], "peer, batch 2": [2.0, 6.0]})
    found = decode._comparison(samples, [2], "transformers 5")
    speed, times = {"best": 1.0, "median": 0.5}, {"least": 2.0, "median": 2.5}
    assert found["batches"] == [{"batch": 2, "tokens_per_second": speed, "ours_is_times": times}]
    assert "transformers 5" in decode._comparison_lines(found)[1]
    assert decode._comparison_lines(None) == []


@pytest.mark.parametrize("words", [[*TRAIN, "--against", "torch"], [*DECODE, "--against", "transformers"]])
def test_a_peer_needs_its_python(words: list[str]) -> None:
    with pytest.raises(UsageError, match="--against needs --peer-python PYTHON"):
        command.run(parsed(*words))
