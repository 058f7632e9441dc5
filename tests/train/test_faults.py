"""A rank of a real job that dies, stops, raises or calls the wrong collective ends the job, which says who."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from mpitp.comm import run_threads
from mpitp.train.stop import StopSignals
from tests.launch.test_launch_faults import MOST_SECONDS, MPIEXEC, Job, needs_mpiexec, start
from tests.train.run_case import config, losses, make_data, run, tables, write_run_file

PROGRAM = str(Path(__file__).with_name("faulty_run.py"))
HOST = socket.gethostname()
pytestmark = needs_mpiexec


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def faulty(folder: Path, data: Path, fault: str, rank: int, *words: str, step: int = 4, watchdog: str = "30m") -> Job:
    """A run on 3 ranks whose one rank goes wrong before a step; the clock runs from that step on."""
    settings = tables(data, folder / "run", checkpoint_every=2, train_watchdog=watchdog)
    path = write_run_file(folder / "run.toml", settings)
    ranks = [str(MPIEXEC), "-n", "3", sys.executable, PROGRAM, fault, str(rank), str(step)]
    return start([*ranks, "train", str(path), *words])


def survives(folder: Path, data: Path) -> None:
    """The run goes on from its newest checkpoint, here on threads."""
    settings = config(data, folder / "run", checkpoint_every=2)
    run(2, settings, resume="auto", stop=StopSignals(()))
    assert len(losses(folder / "run")) == 10


@pytest.mark.parametrize("rank", [0, 2])
def test_killed_rank_ends_the_job_and_the_run_goes_on(tmp_path: Path, data: Path, rank: int) -> None:
    job = faulty(tmp_path, data, "KILL", rank)
    assert job.code not in (0, 75) and job.seconds < MOST_SECONDS
    said = job.out + job.err
    if "BAD TERMINATION" in said:  # MPICH kills all ranks at once; `mpitp launch` says more, see tests/launch
        assert re.search(rf"PID \d+ RUNNING AT {HOST}", said)
    else:
        assert re.search(rf"rank {rank} on {HOST} \(process \d+\) has died: killed, or out of memory\?", said)
        assert re.search(r"rank \d (is|was last) in number \d+ of group tp, .* at [a-z]+/\w+.py:\d+", said)
    survives(tmp_path, data)


def test_exception_names_the_rank(tmp_path: Path, data: Path) -> None:
    job = faulty(tmp_path, data, "bug", 2)
    assert job.code == 1 and job.seconds < MOST_SECONDS
    assert f"rank 2 of 3 on {HOST}: Traceback" in job.err and "KeyError: 'a bug on purpose'" in job.err
    assert "has died" not in job.err


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_makes_the_watchdog_speak_and_end_the_job(tmp_path: Path, data: Path, rank: int) -> None:
    job = faulty(tmp_path, data, "STOP", rank, watchdog="2s")
    assert job.code == 6 and job.seconds < MOST_SECONDS
    others = "1, 2" if rank == 0 else "0, 2"
    assert "watchdog: a collective has not completed for 2 s" in job.err
    assert re.search(rf"waiting: ranks {others} in number \d+ of group tp, .*all_reduce.* at \w+/\w+.py:\d+", job.err)
    assert re.search(rf"late: rank {rank} on {HOST} \(process \d+\), silent for \d+ s: stopped, dead or cut", job.err)
    assert re.search(r"LaunchError: the collective number \d+ of group tp, .* did not complete in 4 s", job.err)
    survives(tmp_path, data)


def test_busy_rank_is_told_with_its_place(tmp_path: Path, data: Path) -> None:
    job = faulty(tmp_path, data, "loop", 1, watchdog="2s")
    assert job.code == 6 and job.seconds < MOST_SECONDS
    assert f"late: rank 1 on {HOST} " in job.err and "alive" in job.err
    assert re.search(r"its program is at train/faulty_run.py:\d+ in go_wrong <", job.err)


@pytest.mark.parametrize(("fault", "call"), [("extra", r"barrier \[\]"), ("shape", r"all_reduce\(sum\) \[3\] float32")])
def test_wrong_collective_in_debug_mode_names_both_sites(tmp_path: Path, data: Path, fault: str, call: str) -> None:
    job = faulty(tmp_path, data, fault, 1, "--debug-collectives")
    assert job.code == 6 and job.seconds < MOST_SECONDS
    assert len(re.findall(r"LaunchError: collective \d+ differs between ranks", job.err)) == 1
    assert re.search(rf"rank 0 on {HOST} calls .* at \w+/\w+\.py:\d+ in ", job.err)
    assert re.search(rf"rank 1 on {HOST} calls {call} at train/faulty_run.py:\d+ in go_wrong", job.err)


def test_wrong_collective_without_it_is_told_by_the_watchdog(tmp_path: Path, data: Path) -> None:
    job = faulty(tmp_path, data, "extra", 1, watchdog="2s")
    assert job.code == 6 and job.seconds < MOST_SECONDS
    assert re.search(r"waiting: rank 1 in number \d+ of group tp, barrier \[\] at train/faulty_run.py", job.err)
    assert "the ranks disagree on what comes here; --debug-collectives" in job.err


def test_debug_mode_changes_nothing(tmp_path: Path, data: Path) -> None:
    found = []
    for debug in (False, True):
        settings = config(data, tmp_path / str(debug), checkpoint_background=True, checkpoint_every=3)
        run(3, settings, debug_collectives=debug, stop=StopSignals(()))
        found.append(losses(tmp_path / str(debug)))
    assert found[0] == found[1]
    assert run_threads(2, lambda group: group.size) == [2, 2]
