"""A server on several ranks: the same texts, cores that rest, an end that is noticed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.served import Served, make_directory, served
from tests.serve.test_server import ask, wait_until

pytest.importorskip("mpi4py")
BODY = {"prompt": "open", "max_tokens": 40, "seed": 3, "n": 2, "logprobs": 1}


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    own = [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return own + [below for child in own for below in children(child)]


def ranks_below(pid: int) -> list[int]:
    """The ranks' processes below a launcher, rank 0 first."""
    found = {}
    for child in children(pid):
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{child}/cmdline").read_bytes()
        for variable in environ:
            name, _, value = variable.partition(b"=")
            if name in (b"PMI_RANK", b"OMPI_COMM_WORLD_RANK") and b"serve" in words:
                found[int(value)] = child
    return [found[rank] for rank in sorted(found)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def choices(answer: Any) -> Any:
    return answer["choices"]


def test_two_ranks_answer_as_one_rest_and_drain(tmp_path: Path) -> None:
    model = make_directory(tmp_path / "tiny")
    with served(model, "--invariant", "--quiet") as alone:
        expected = choices(ask(f"{alone.url}/v1/completions", BODY)[1])
        alone.process.terminate()
        assert alone.wait() == 0
    with served(model, "--invariant", "--quiet", ranks=2) as running:
        assert choices(ask(f"{running.url}/v1/completions", BODY)[1]) == expected
        pids = ranks_below(running.process.pid)
        assert len(pids) == 2
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(1.5)
        spent = [cpu_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        assert max(spent) < 0.3, "an idle rank burns its core"
        assert choices(ask(f"{running.url}/v1/completions", BODY)[1]) == expected, "awake again"
        running.end()


@contextlib.contextmanager
def asking(running: Served) -> Iterator[list[Any]]:
    """While a long text is asked for; what became of it is in the list behind it."""
    found: list[Any] = []

    def client() -> None:
        body = {"prompt": "open", "max_tokens": 4000, "ignore_eos": True}
        try:
            found.append(ask(f"{running.url}/v1/completions", body, timeout=60))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    wait_until(lambda: "mpitp_texts_running 1.0" in ask(f"{running.url}/metrics")[1])
    yield found
    thread.join(10)


def is_told(found: list[Any], words: str) -> bool:
    """Whether the client was told why, or at least lost the connection."""
    return isinstance(found[0], OSError) or (found[0][0] == 503 and words in found[0][1]["error"]["message"])


def test_a_dead_rank_ends_the_server(tmp_path: Path) -> None:
    model = make_directory(tmp_path / "tiny", max_position_embeddings=4096)
    with served(model, "--quiet", ranks=3) as running:
        pids = ranks_below(running.process.pid)
        with asking(running) as found:
            started = time.monotonic()
            os.kill(pids[1], signal.SIGKILL)
            assert running.wait() != 0
        assert time.monotonic() - started < 10
    assert is_told(found, "rank 1")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_hangs_ends_the_server(tmp_path: Path, stopped: int) -> None:
    model = make_directory(tmp_path / "tiny", max_position_embeddings=4096)
    with served(model, "--quiet", "--step-seconds", "3", ranks=2) as running:
        pids = ranks_below(running.process.pid)
        with asking(running) as found:
            os.kill(pids[stopped], signal.SIGSTOP)
            try:
                assert running.wait(40) != 0
            finally:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    assert is_told(found, "a step has not ended")  # of a stopped rank 0 too: Open MPI wakes it to end it
    assert f"a step has not ended in 3 s: rank {stopped} is stopped" in running.errors
