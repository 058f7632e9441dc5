"""What `launch` adds to a launcher that names only a process: rank, host, collective; signals and codes passed on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mpitp.comm.watchdog import Entry, Status
from mpitp.launch.descendants import Descendants
from mpitp.launch.mpiexec import Job
from mpitp.launch.supervise import heeded_signals, training
from mpitp.launch.witness import Witness, run_and_explain
from tests.launch.test_launch_faults import MOST_SECONDS, environment, needs_mpiexec
from tests.train.run_case import losses, make_data, tables, write_run_file

HOST = socket.gethostname()
IS_MPICH = (Path(sys.executable).parent / "hydra_pmi_proxy").exists()
NO_JOB = Job([], {})  # that has not begun


def leave_statuses(run_dir: Path, written: float, processes: dict[int, tuple[str, int]] | None = None) -> None:
    folder = run_dir / ".watchdog-x-1-1"
    folder.mkdir(parents=True)
    for rank in range(3):
        ring = (Entry(40 + rank, "tp", "barrier []", "a.py:1 in f", written + rank),)
        host, pid = (processes or {}).get(rank, ("n1", 500 + rank))
        status = Status(rank, host, pid, written, "b.py:2 in g", ring)
        (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(status)))


def test_explanation_names_rank_host_and_collective(tmp_path: Path) -> None:
    witness = Witness(NO_JOB, tmp_path, 3)
    leave_statuses(tmp_path, time.time())
    text = witness.explain(501, "n1")
    assert text is not None
    first, second, third = text.splitlines()
    assert first == "rank 1 on n1 (process 501) has died: killed, or out of memory?"
    assert second == "  rank 2 is in number 42 of group tp, barrier [] at a.py:1 in f"
    assert re.fullmatch(r"  rank 1, .* s ago, had begun number 41 of group tp, barrier \[\] at a.py:1 in f", third)


def test_what_is_not_known_is_not_explained(tmp_path: Path) -> None:
    assert Witness(NO_JOB, tmp_path, 3).explain(501, "n1") is None
    leave_statuses(tmp_path, time.time() - 1)
    assert Witness(NO_JOB, tmp_path, 3).explain(501, "n1") is None  # in a job before, another process had this number
    witness = Witness(NO_JOB, tmp_path / "now", 3)
    leave_statuses(tmp_path / "now", time.time())
    assert witness.explain(999, "n1") is None
    assert witness.explain(501, "n2") is None


def test_what_was_seen_counts_for_more_than_what_the_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    found = Descendants({rank: sleeper.pid for rank, sleeper in enumerate(sleepers)}, [])
    monkeypatch.setattr("mpitp.launch.witness.descendants", lambda launcher: found)
    monkeypatch.setattr(Job, "pid", 1)
    with Witness(NO_JOB, tmp_path, 3) as witness:
        leave_statuses(tmp_path, time.time(), {rank: (HOST, sleeper.pid) for rank, sleeper in enumerate(sleepers)})
        end = time.monotonic() + 20
        time.sleep(0.5)
        for sleeper in sleepers[::-1]:
            sleeper.kill()
            sleeper.wait()
            while len(witness._deaths) < 1 and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.05)
    text = witness.explain(sleepers[0].pid, HOST)
    assert text is not None and text.startswith(f"rank 1 on {HOST} (process {sleepers[1].pid}) has died")
    assert "or rank" not in text
    witness._deaths = [(5.0, 1), (5.0001, 0)]
    assert "(or rank 0 before it: they died at about one time)" in str(witness.explain(0, HOST))
    witness._deaths = [(5.0, 1), (5.02, 0)]
    assert "or rank" not in str(witness.explain(0, HOST))
    assert "(or rank 0 before it: they died at about one time)" in str(witness.explain(sleepers[0].pid, HOST))
    witness._deaths = [(5.0, 1), (5.0, 0)]  # found by one look: the launcher's word comes first
    assert str(witness.explain(sleepers[0].pid, HOST)).startswith(f"rank 0 on {HOST}")


def test_settings_are_read_from_the_words(tmp_path: Path) -> None:
    path = str(write_run_file(tmp_path / "run.toml", tables(tmp_path, tmp_path / "run", train_signals=["USR2"])))

    def run_dir(*words: str) -> str:
        settings = training(["train", *words])
        assert settings is not None
        return settings.run_dir

    assert run_dir(path) == str(tmp_path / "run")
    assert run_dir("--resume", "auto", "--debug-collectives", "--trace", "t.json", path) == str(tmp_path / "run")
    assert run_dir(path, "--set", "train.run_dir=/a", "--set", "train.steps=3") == "/a"
    assert run_dir(path, "--set=train.run_dir=/b") == "/b"
    assert training(["train", path]).signals == ("USR2",)  # type: ignore[union-attr]
    for words in ([], ["doctor"], ["train"], ["train", "none.toml"], ["train", path, "--set", "train.seed=x"]):
        assert training(words) is None


def launched(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`mpitp launch` of an endless run on 3 ranks, when it has saved its first checkpoint."""
    settings = tables(make_data(folder), folder / "run", train_steps=100_000, checkpoint_every=2, train_eval_every=0)
    path = write_run_file(folder / "run.toml", settings)
    command = [sys.executable, "-m", "mpitp", "launch", "-n", "3", "--", "train", str(path), *words]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + 60
    while not list(folder.glob("run/checkpoints/step-*")) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    return process


def process_of(run: Path, rank: int) -> int:
    (path,) = run.glob(f".watchdog-*/rank-{rank}.json")
    return json.loads(path.read_text())["pid"]


@needs_mpiexec
def test_killed_rank_is_named_whatever_the_launcher(tmp_path: Path) -> None:
    process = launched(tmp_path)
    try:
        victim, started = process_of(tmp_path / "run", 1), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - started < MOST_SECONDS
    assert process.returncode == 137
    named = f"rank 1 on {HOST} (process {victim}) has died: killed, or out of memory?"
    assert named in err or "(or rank 1 before it" in err, out + err
    assert re.search(r"rank \d (is|was last) in number \d+ of group tp, .* at [a-z]+/\w+.py:\d+", err)


@needs_mpiexec
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_signals_and_the_exit_code_are_passed_on(tmp_path: Path, name: str, send: Any) -> None:
    process = launched(tmp_path)
    try:
        send(process.pid, signal.Signals[name])
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert " received); the state is saved in" in err and "has died" not in err
    assert f"({name} received)" in err or f"{name} is handed on as SIGUSR1" in err
    assert len(losses(tmp_path / "run")) == max(
        int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*")
    )


@needs_mpiexec
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_interrupt_has_one_exit_code(tmp_path: Path, send: Any) -> None:
    process = launched(tmp_path)
    try:
        send(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    assert "Traceback" not in err


BANNER = """PID {pid} RUNNING AT {host}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: {words}
"""


@pytest.mark.parametrize(
    ("name", "words", "code", "said"),
    [
        ("INT", "Interrupt (signal 2)", 130, "mpitp launch: interrupted\n"),
        ("TERM", "Terminated (signal 15)", 143, "mpitp launch: ended by SIGTERM\n"),
        (
            "INT",
            "Killed (signal 9)",
            130,
            "mpitp launch: rank 1 on n1 (process 501) has died: killed, or out of memory?",
        ),
    ],
)
def test_ranks_of_a_script_that_end_as_told_have_not_died(
    name: str, words: str, code: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script leaves the signal to the system, and MPICH's launcher tells of it as of a death."""
    banner = BANNER.format(pid=501, host="n1", words=words)
    job = Job(["sh", "-c", f"echo '{banner}'; kill -{name} $PPID; sleep 0.2; exit 2"], dict(os.environ))
    run_dir = tmp_path / "run"
    held = Witness.__enter__

    def enter(witness: Witness) -> Witness:  # the ranks come after the witness
        leave_statuses(run_dir, time.time())
        return held(witness)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Witness, "__enter__", enter)
        assert run_and_explain(job, run_dir, 3) == code
    assert capfd.readouterr().err.startswith(said)


@needs_mpiexec
def test_job_does_not_go_on_without_its_head(tmp_path: Path) -> None:
    process = launched(tmp_path)
    pids = [process_of(tmp_path / "run", rank) for rank in range(3)]
    process.kill()
    process.communicate(timeout=60)
    end = time.monotonic() + 20
    while any(_lives(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(_lives(pid) for pid in pids)


@needs_mpiexec
def test_rank_that_dies_before_its_first_step_is_named(tmp_path: Path) -> None:
    """No file of a watchdog tells of it yet; here there is no training at all."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, time\nrank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "time.sleep(2 if rank == 1 else 0)\n"
        "if rank == 1: print('process', os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "from mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n"
    )
    command = [sys.executable, "-m", "mpitp", "launch", "-n", "3", "--", str(script)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    (pid,) = re.findall(r"process (\d+)", result.stdout)
    assert result.returncode == 137
    said = f"mpitp launch: rank 1 on {HOST} (process {pid}) has died: killed, or out of memory?"
    assert said in result.stderr or "(or rank 1 before it" in result.stderr, result.stderr


def child_of(pid: int) -> int:
    """The first process below another."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@needs_mpiexec
def test_death_of_the_launcher_itself_is_told(tmp_path: Path) -> None:
    process = launched(tmp_path)
    try:
        mpiexec = child_of(process.pid)
        os.kill(mpiexec, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 137
    assert f"mpitp launch: mpiexec (process {mpiexec}) has died of SIGKILL: killed, or out of memory?\n" in err
    assert "rank" not in err.split("has died of")[1]


@needs_mpiexec
@pytest.mark.skipif(not IS_MPICH, reason="OPEN MPI HAS NO PROCESS BETWEEN ITS MPIEXEC AND THE RANKS OF ITS OWN HOST")
def test_death_of_the_launcher_s_helper_ends_the_job(tmp_path: Path) -> None:
    process = launched(tmp_path)
    try:
        helper = child_of(child_of(process.pid))
        pids = [process_of(tmp_path / "run", rank) for rank in range(3)]
        os.kill(helper, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (75, 137) and not any(_lives(pid) for pid in pids)
    assert process.returncode == 75 or f"helper (process {helper}) has died: killed, or out of memory?" in err, err


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_signals_that_end_a_job_in_order() -> None:
    assert heeded_signals(["serve", "--model", "m"], None) == ("TERM", "INT", "USR1")
    assert heeded_signals(["generate", "--model", "m"], None) == heeded_signals([], None) == ()
