"""What `mpitp launch` makes of its mpiexec: output, signals and exit codes, with stand-ins and with the real ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitp.errors import LaunchError
from mpitp.launch.mpiexec import Job, exit_code, passed_as
from tests.launch.test_launch_faults import ROOT, environment, needs_mpiexec
from tests.launch.test_supervise import launched

MPICH_TAIL = "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis typically refers to"
MODEL = str(ROOT / "tests/parity/golden/llama-gqa")
HUP, INT, TERM, USR1, USR2 = signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize(
    ("code", "tail", "received", "expected"),
    [
        (0, "", [TERM], 0),
        (75, "", [TERM], 75),
        (5, "", [], 5),
        (255, "", [INT], 130),
        (1, "", [USR1, TERM], 143),
        (9, MPICH_TAIL, [], 137),
        (137, "", [], 137),  # as Open MPI says it
        (9, "", [], 9),  # a script's own code
        (-9, "", [], 137),  # the launcher itself was killed
        (-15, "", [INT], 130),
    ],
)
def test_exit_codes(code: int, tail: str, received: list[int], expected: int) -> None:
    assert exit_code(code, tail, received) == expected


def test_signals_that_open_mpi_would_not_survive() -> None:
    assert passed_as("open mpi", ("USR1", "TERM")) == {TERM: USR1}
    assert passed_as("open mpi", ("TERM", "INT", "USR2")) == {TERM: signal.SIGUSR2, INT: signal.SIGUSR2}
    assert passed_as("open mpi", ("TERM",)) == {}  # nothing that it would hand on is listened to
    assert passed_as("open mpi", ("USR1",)) == {}


def test_signals_that_mpich_would_not_survive() -> None:
    assert passed_as("hydra", ("USR1", "TERM")) == {}
    assert passed_as("hydra", ("HUP", "INT", "USR2")) == {HUP: INT, USR2: INT}
    assert passed_as("hydra", ("HUP", "TERM", "USR1", "INT")) == {HUP: USR1}  # it hands the others on itself
    assert passed_as("hydra", ("HUP", "USR2")) == {}
    assert passed_as("srun", ("HUP", "USR1")) == {}


RUN = """\
import sys
from mpitp.launch.guard import guarded
from mpitp.launch.mpiexec import Job
sys.exit(guarded(Job({command!r}, {{"PATH": "/usr/bin:/bin"}}, {options}).run))
"""


def job(script: str, options: str = "", stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A process that runs a shell script as its mpiexec; `options` of Job as Python text."""
    code = RUN.format(command=["sh", "-c", script], options=options)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], text: str | None = None) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(text, timeout=30)
    finally:
        process.kill()
    return process.returncode, out, err


def test_output_goes_through_and_input_is_closed() -> None:
    assert ended(job("cat; echo out; echo err >&2; exit 3"), "input") == (3, "out\n", "err\n")
    assert ended(job("cat", "stdin=None"), "input") == (0, "input", "")
    size = 3_000_000
    code, out, _ = ended(job(f"head -c {size} /dev/zero"))
    assert (code, len(out)) == (0, size)


def test_pipes_that_somebody_keeps_open_are_not_waited_for() -> None:
    started = time.monotonic()
    assert ended(job("sleep 20 & echo done; echo $! >&2"))[1] == "done\n"
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_signals_go_through_once(send: object) -> None:
    script = "trap 'n=x$n' USR1; trap 'echo $n; exit 75' TERM; echo ready; while :; do sleep 0.05; done"
    process = job(script)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in (USR1, TERM):
        send(process.pid, number)  # type: ignore[operator]
        time.sleep(0.3)
    assert ended(process) == (75, "x\n", "")


def test_what_was_ignored_stays_ignored() -> None:
    process = job("echo ready; sleep 1; echo done")
    process.stdout.readline()  # type: ignore[union-attr]
    process.send_signal(signal.SIGHUP)
    assert ended(process)[0] == 129
    code = RUN.format(command=["sh", "-c", "echo ready; sleep 1; echo done"], options="")
    command = ["sh", "-c", 'trap "" HUP; exec "$0" -c "$1"', sys.executable, code]
    kept = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert kept.stdout is not None and kept.stdout.readline() == "ready\n"
    kept.send_signal(signal.SIGHUP)
    assert ended(kept) == (0, "done\n", "")


def read_end_closed() -> int:
    """The write end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_job_ends_when_its_reader_leaves() -> None:
    started = time.monotonic()
    code, _, err = ended(job("echo 1; sleep 0.3; echo complaint >&2; sleep 20", stdout=read_end_closed()))
    assert (code, err) == (141, "")
    assert time.monotonic() - started < 10


def test_training_outlives_its_reader() -> None:
    code, _, err = ended(job("echo 1; sleep 0.2; echo done >&2; exit 75", "outlives_reader=True", read_end_closed()))
    assert (code, err) == (75, "done\n")


def test_output_that_cannot_be_written_is_said() -> None:
    code, _, err = ended(job("echo 1; sleep 20", stdout=os.open("/dev/full", os.O_WRONLY)))
    assert (code, err) == (4, "FileError: can't write to standard output: No space left on device\n")


QUICKLY = """\
import signal
from mpitp.launch import escalation
escalation.STEPS = ((0.4, signal.SIGINT), (0.4, signal.SIGTERM), (0.4, signal.SIGKILL))
"""


@pytest.mark.parametrize(
    ("script", "options", "followed"),
    [
        ("exec sleep 20", "", []),
        ("trap 'n=$((n+1)); [ $n = 2 ] && exit 7' INT; while :; do sleep 0.1; done", "", ["SIGINT"]),
        ("trap '' INT; sleep 20", "", ["SIGINT", "SIGTERM"]),
        ("trap '' INT TERM; sleep 20 & wait", "", ["SIGINT", "SIGTERM", "SIGKILL"]),
        ("trap '' INT; sleep 3; exit 75", "saves_on_int=True", []),
    ],
)
def test_interrupt_ends_a_job_in_the_end(script: str, options: str, followed: list[str]) -> None:
    code = QUICKLY + RUN.format(command=["sh", "-c", f"echo; {script}"], options=options)
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "\n"
    time.sleep(0.2)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert process.returncode == (75 if options else 130) and time.monotonic() - started < 10
    assert re.findall(r"the job has not ended: (\w+) follows", err) == followed


def test_launcher_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"can't start {tmp_path}/none: No such file"):
        Job([f"{tmp_path}/none"], {}).run()
    with pytest.raises(LaunchError, match="can't start echo: Argument list too long"):
        Job(["echo", "x" * 1_000_000], dict(os.environ)).run()


def launch(*words: str, ranks: int = 2) -> list[str]:
    return [sys.executable, "-m", "mpitp", "launch", "-n", str(ranks), "--", *words]


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["doctor", "--json"],
        ["step", "--list"],
        ["--help"],
        ["verify", "--model", MODEL],
        ["verify", "--model", MODEL, "--json"],
    ],
    ids=" ".join,
)
def test_reader_that_has_left_ends_a_verb_quietly(words: list[str]) -> None:
    command = [sys.executable, "-m", "mpitp", *words]
    result = subprocess.run(
        command, env=environment(), stdout=read_end_closed(), stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    said = [line for line in result.stderr.splitlines() if "on one rank the model is compared with itself" not in line]
    assert (result.returncode, said) == (141, [])


def test_help_ends_quietly_too() -> None:  # argparse overlooks it when nobody reads
    command = [sys.executable, "-m", "mpitp", "train", "--help"]
    result = subprocess.run(
        command, env=environment(), stdout=read_end_closed(), stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert result.returncode in (0, 141) and result.stderr == ""


@needs_mpiexec
def test_reader_that_has_left_ends_a_job_quietly() -> None:
    command = launch("doctor")
    result = subprocess.run(
        command, env=environment(), stdout=read_end_closed(), stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert result.returncode == 141
    assert all(line.startswith("mpitp launch: ") for line in result.stderr.splitlines()), result.stderr


def test_other_broken_pipes_are_bugs() -> None:
    code = "import sys; from mpitp.launch.guard import guarded\ndef f(): raise BrokenPipeError(32, 'a peer left')\n"
    result = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(guarded(f))"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1 and "a peer left" in result.stderr


@needs_mpiexec
@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT"])
def test_killed_rank_gives_one_code(tmp_path: Path, name: str) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal\nfrom mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n"
        f"if MPI.COMM_WORLD.rank: os.kill(os.getpid(), signal.{name})\nMPI.COMM_WORLD.barrier()\n"
    )
    result = subprocess.run(
        launch(str(script)), env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    number = signal.Signals[name]
    # MPICH's mpiexec tells the bits of all ranks' statuses together, those that it has killed itself (9) included
    assert result.returncode in (128 + number, 128 + (number | signal.SIGKILL))


@needs_mpiexec
@pytest.mark.parametrize("word", ["--prompts -", "--prompts=-"])
def test_large_standard_input_reaches_rank_0(word: str) -> None:
    size = 10_000_000
    command = launch("generate", "--model", "none", *word.split())
    result = subprocess.run(
        command, env=environment(), input=b"x" * size + b"\xff", capture_output=True, timeout=60, check=False
    )
    err = result.stderr.decode()
    assert result.returncode == 4
    said = re.findall(r"^FileError: (\S+)/standard-input is not UTF-8: .* at byte (\d+) \(0xff\)", err, re.M)
    assert len(said) == 1 and int(said[0][1]) == size, err
    assert not Path(said[0][0]).exists()


@needs_mpiexec
def test_small_standard_input_ends() -> None:
    result = subprocess.run(
        launch("generate", "--model", "none", "--prompts", "-"),
        env=environment(),
        input=b"a\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 4 and b"none" in result.stderr


@needs_mpiexec
def test_hangup_lets_a_training_run_save(tmp_path: Path) -> None:
    process = launched(tmp_path, "--set", 'train.signals=["HUP", "USR1"]')
    try:
        process.send_signal(HUP)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, out + err
    assert "SIGHUP is handed on as SIGUSR1" in err and "(SIGUSR1 received); the state is saved in" in err
