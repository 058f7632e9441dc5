"""What the watchdog says: as a pure function of statuses, and on ranks of which one is late."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.comm import watchdog as watchdog_module
from mpitp.comm.deaths import PeerWatch, Process, this_process
from mpitp.comm.watchdog import RING, Entry, Status, Watchdog, death_report, read_statuses, report

NOW = 1000.0


def entry(number: int, started: float, ended: float = 0.0, group: str = "tp") -> Entry:
    return Entry(number, group, "all_reduce(sum) [4, 8] float32", f"a.py:{number} in f", started, ended)


def status(rank: int, *ring: Entry, written: float = NOW - 1, members: dict[str, list[int]] | None = None) -> Status:
    return Status(rank, f"node{rank}", 100 + rank, written, f"b.py:{rank} in g", ring, members or {})


WAITING = (entry(6, 860, 861), entry(7, 870))


def test_late_and_alive() -> None:
    late = status(1, entry(5, 850, 851), entry(6, 860, 862))
    text = report({0: status(0, *WAITING), 1: late, 2: status(2, *WAITING)}, 3, 120, NOW)
    assert text.splitlines() == [
        "watchdog: a collective has not completed for 120 s",
        "  waiting: ranks 0, 2 in number 7 of group tp, all_reduce(sum) [4, 8] float32 at a.py:7 in f",
        "  late: rank 1 on node1 (process 101), alive",
        "    its program is at b.py:1 in g; its last collectives:",
        "    number 5 of group tp, all_reduce(sum) [4, 8] float32 at a.py:5 in f: ended 149 s ago",
        "    number 6 of group tp, all_reduce(sum) [4, 8] float32 at a.py:6 in f: ended 138 s ago",
    ]


def test_stopped_inside_the_collective_is_late() -> None:
    text = report({0: status(0, *WAITING), 1: status(1, *WAITING, written=872)}, 2, 120, NOW)
    assert "waiting: rank 0 in number 7" in text
    assert "late: rank 1 on node1 (process 101), silent for 128 s: stopped, dead or cut off" in text
    assert "its program was, when last heard of, at b.py:1 in g" in text and "a.py:7 in f: in it" in text


def test_never_seen() -> None:
    text = report({0: status(0, *WAITING)}, 3, 120, NOW)
    assert "late: rank 1, of which nothing is known (it has left no status file)" in text
    assert "late: rank 2, of which" in text


def test_has_done_nothing_yet() -> None:
    assert "late: rank 1 on node1" in report({0: status(0, *WAITING), 1: status(1)}, 2, 120, NOW)


def test_all_are_in_it() -> None:
    text = report({rank: status(rank, *WAITING) for rank in range(2)}, 2, 120, NOW)
    assert "waiting: ranks 0, 1" in text and "every rank is in it: the network or the MPI library" in text


def test_ranks_that_disagree() -> None:
    other = Entry(7, "tp", "barrier []", "c.py:1 in h", 880)
    text = report({0: status(0, *WAITING), 1: status(1, other), 2: status(2, *WAITING)}, 3, 120, NOW)
    assert "waiting: ranks 0, 2 in number 7 of group tp, all_reduce(sum)" in text
    assert "waiting: rank 1 in number 7 of group tp, barrier [] at c.py:1 in h" in text
    assert "the ranks disagree on what comes here" in text


def test_only_the_ranks_of_the_group_count() -> None:
    """Ranks 0 and 1 wait in their own group for rank 2, which waits for nobody; rank 3 isn't in that group."""
    members = {"dp": [0, 1, 2]}
    statuses = {rank: status(rank, entry(9, 860, group="dp"), members=members) for rank in (0, 1)}
    statuses[2] = status(2, entry(8, 850, 851, group="dp"), entry(70, 990, 991), members=members)
    statuses[3] = status(3, entry(99, 990, 991))
    text = report(statuses, 4, 120, NOW)
    assert "waiting: ranks 0, 1 in number 9 of group dp" in text
    assert "late: rank 2 on node2" in text and "rank 3" not in text


def test_who_is_late_with_a_message_is_who_does_not_wait() -> None:
    """The stages of a pipeline send and receive different numbers of messages."""

    def waits(rank: int, number: int, source: int) -> Status:
        newest = replace(entry(number, 870, group="pp"), call=f"wait recv(from {source}) [4, 8] float32")
        return status(rank, entry(number - 1, 860, 861, "pp"), newest)

    busy = status(1, entry(90, 860, 861, "pp"))
    text = report({0: waits(0, 7, 1), 1: busy, 2: waits(2, 80, 1)}, 3, 120, NOW)
    assert "waiting: rank 0 in number 7 of group pp, wait recv(from 1)" in text
    assert "waiting: rank 2 in number 80 of group pp, wait recv(from 1)" in text
    assert "late: rank 1 on node1" in text and text.count("late:") == 1
    assert "disagree" not in text
    text = report({0: waits(0, 7, 1), 1: waits(1, 9, 0)}, 2, 120, NOW)
    assert text.endswith("every rank waits for a message that another has yet to send")


def test_death_report_names_rank_host_and_collective() -> None:
    dead = Process(2, "node2", 102, "m")
    text = death_report(dead, status(2, entry(6, 860, 861), written=NOW - 0.3), status(0, *WAITING), NOW)
    assert text.splitlines() == [
        "rank 2 on node2 (process 102) has died: killed, or out of memory?",
        "  rank 0 is in number 7 of group tp, all_reduce(sum) [4, 8] float32 at a.py:7 in f",
        "  rank 2, 0.3 s ago, had begun number 6 of group tp, all_reduce(sum) [4, 8] float32 at a.py:6 in f",
    ]
    assert death_report(dead, None, status(0), NOW).count("\n") == 0


@pytest.mark.parametrize(("ended", "word"), [(0, "in"), (861, "after")])
def test_death_report_is_exact_where_a_slip_is(ended: float, word: str) -> None:
    exact = replace(status(2, entry(6, 860, ended), written=NOW - 3), is_exact=True)
    last = death_report(Process(2, "node2", 102, "m"), exact, status(0, *WAITING), NOW).splitlines()[-1]
    assert last == f"  rank 2 died {word} number 6 of group tp, all_reduce(sum) [4, 8] float32 at a.py:6 in f"


def watched(group: Group, directory: Path, late: int, seconds: float, limit: float) -> None:
    with Watchdog(directory, group.rank, group.size, limit) as watchdog:
        watched = watchdog.watch(group, "tp")
        for _ in range(3):
            watched.all_reduce(np.ones((2, 3), np.float32))
        if group.rank == late:
            time.sleep(seconds)
        watched.start_all_reduce(np.ones(5)).wait()


@pytest.mark.parametrize("late", [0, 2])
def test_late_rank_is_told_once_and_the_job_goes_on(tmp_path: Path, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "end_job", lambda error: None)  # not this process, on a very slow machine
    said = io.StringIO()
    with redirect_stderr(said):
        run_threads(3, watched, tmp_path / "watchdog", late, 1.6, 0.8, timeout=30)
    text = said.getvalue()
    others = [rank for rank in range(3) if rank != late]
    assert text.count("watchdog: a collective has not completed for 0.8 s") == 1
    assert f"waiting: ranks {others[0]}, {others[1]} in number 4 of group tp, start all_reduce(sum) [5] float64" in text
    assert f"late: rank {late} on " in text and "), alive\n" in text
    assert "test_watchdog.py" in text and f"process {os.getpid()}" in text
    assert "its program is at " in text and "in watched < " in text
    assert os.listdir(tmp_path) == []


def test_nothing_is_said_while_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(2, watched, tmp_path / "watchdog", -1, 0.0, 30.0)
    assert capsys.readouterr().err == ""


def test_status_files(tmp_path: Path) -> None:
    def rank(group: Group) -> Any:
        with Watchdog(tmp_path / "w", group.rank, group.size, 0.08) as watchdog:
            watched = watchdog.watch(group, "tp")
            part = watched.split(group.rank % 2, group.rank)
            for _ in range(RING + 5):
                watched.all_gather_objects(None)
            part.barrier()
            time.sleep(0.3)
            group.barrier()
            statuses = read_statuses(tmp_path / "w")
            group.barrier()
        return statuses

    statuses = run_threads(3, rank)[0]
    assert sorted(statuses) == [0, 1, 2]
    for number, found in statuses.items():
        assert found.rank == number and found.pid == os.getpid() and 0 <= time.time() - found.written < 30
        tp = [entry.number for entry in found.ring if entry.group == "tp"]
        assert tp == list(range(tp[-1] - RING + 1, tp[-1] + 1))
        assert all(entry.ended >= entry.started for entry in found.ring)
    name = "tp/ranks 0, 2"
    assert statuses[0].members == {name: [0, 2]} and "barrier" in statuses[2].last_of(name).call
    (tmp_path / "rank-7.json").write_text('{"rank": 7')
    assert read_statuses(tmp_path) == {}


def test_a_directory_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Watchdog(tmp_path / "file" / "watchdog", 0, 1, 0.05) as watchdog:
        watchdog.watch(SerialGroup(), "tp").barrier()
        time.sleep(0.1)


ENDED = """
import sys, time
from pathlib import Path
import numpy as np
from mpitp.comm import run_threads
from mpitp.comm.watchdog import Watchdog

def rank(group):
    with Watchdog(Path(sys.argv[1]), group.rank, group.size, 0.5) as watchdog:
        if group.rank == 1:
            time.sleep(30)
        watchdog.watch(group, "tp").all_reduce(np.ones(3))

run_threads(2, rank)
"""


def test_job_is_ended_after_twice_the_limit(tmp_path: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", ENDED, str(tmp_path / "w")]
    environment = {**os.environ, "PMI_SIZE": "2", "PMI_RANK": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}  # that it is one of several ranks
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 6, done.stderr
    assert time.monotonic() - started < 20
    assert "late: rank 1" in done.stderr
    assert "LaunchError: the collective number 1 of group tp, all_reduce(sum) [3] float64 at " in done.stderr
    assert "did not complete in 1 s" in done.stderr


def test_death_of_a_process_is_noticed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    own = this_process(0)
    processes = [own, Process(1, own.host, child.pid, own.machine), Process(2, "elsewhere", child.pid, "other machine")]
    deaths: list[Any] = []
    with PeerWatch(own, processes, lambda process, living: deaths.append((process.rank, living))):
        time.sleep(0.05)
        assert deaths == []
        child.kill()
        child.wait()
        end = time.monotonic() + 10
        while not deaths and time.monotonic() < end:
            time.sleep(0.01)
    assert deaths == [(1, [0])]


def test_processes_of_threads_are_not_watched() -> None:
    with PeerWatch(this_process(0), [this_process(0), this_process(1)], lambda *death: pytest.fail(str(death))):
        pass
