"""Runs a peer (PyTorch, transformers, in a Python of its own) in turn with ours, on as many ranks and cores.

Rank 0 starts one peer process a rank and tells them, step by step, to run. While they do, our other ranks sleep,
looking for a file every few milliseconds: ranks that spin in a barrier would take the peer's cores.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitp.bench.timing import Samples, Task
from mpitp.comm.deaths import end_with_parent
from mpitp.comm.group import Group
from mpitp.errors import LaunchError

FORMS = ("functions", "dtensor")
PROGRAMS = Path(__file__).parent / "peers"
PATIENCE_SECONDS = 0.003
LEAVE_SECONDS = 60.0


class Peer:
    """The processes of a peer: one a rank, of the same program.

    `place`: the number of the only one of the ranks that is started here, and the port at which they meet; None: all
    are started here.
    """

    def __init__(
        self,
        python: str,
        program: str,
        settings: Mapping[str, Any],
        ranks: int = 1,
        place: tuple[int, int] | None = None,
    ) -> None:
        self._needs = "transformers and torch" if program.startswith("transformers") else "torch"
        rank, port = place or (-1, free_port())
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        for name in ("PYTHONPATH", "OPENBLAS_NUM_THREADS"):
            environment.pop(name, None)
        self._processes: list[subprocess.Popen[str]] = []
        self._is_ending = False
        for number in range(ranks) if place is None else [rank]:
            told = json.dumps({**settings, "rank": number, "ranks": ranks, "port": port})
            self._processes.append(_started([python, str(PROGRAMS / program), told], environment))
        for process in self._processes:
            threading.Thread(target=self._end_with, args=(process,), daemon=True).start()
        self.version = str(self._answer()["ready"])

    def ask(self, line: str) -> dict[str, Any]:
        """Hand a line to all the peer's ranks; what its rank 0 answers, among it the `seconds` that it measured."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # a process that has ended doesn't answer
                process.stdin.write(line + "\n")
                process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Let the processes end; those that don't are ended."""
        self._is_ending = True
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
                process.stdin = None  # so that `communicate` leaves it alone
        for process in self._processes:
            try:
                process.communicate(timeout=LEAVE_SECONDS)  # to its end: a slow one may still be about to write
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def _end_with(self, process: subprocess.Popen[str]) -> None:
        """One that ends early takes the others along: they would wait for it, and rank 0 for their answer."""
        process.wait()
        if not self._is_ending:
            self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _answer(self) -> dict[str, Any]:
        stdout = self._processes[0].stdout
        assert stdout is not None
        while line := stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._kill()
        self.end()
        raise LaunchError(
            f"the peer ended early; its message is above. It needs {self._needs}: name its Python by --peer-python"
        )


@contextlib.contextmanager
def torch_tasks(python: str, settings: Mapping[str, Any], group: Group) -> Iterator[tuple[dict[str, Task], str]]:
    """Tasks "torch, FORM" that run one step of the peer each, and the peer's version."""
    forms = FORMS if group.size > 1 else FORMS[:1]  # on one rank they are one and the same
    with contextlib.ExitStack() as stack:
        peers: dict[str, Peer] = {}
        folder = group.broadcast_object(stack.enter_context(tempfile.TemporaryDirectory()) if group.rank == 0 else None)
        if group.rank == 0:
            for form in forms:
                peers[form] = Peer(python, "torch_train.py", {**settings, "form": form}, group.size)
                stack.callback(peers[form].end)
        version = group.broadcast_object(next(iter(peers.values())).version if peers else None)
        turns = itertools.count()
        yield {f"torch, {form}": _task(form, peers, group, Path(folder), turns) for form in forms}, version


def _task(form: str, peers: Mapping[str, Peer], group: Group, folder: Path, turns: Iterator[int]) -> Task:
    def task() -> float:
        mark = folder / f"turn-{next(turns)}"
        if group.rank == 0:
            seconds = float(peers[form].ask("step")["seconds"])
            mark.touch()
            return seconds
        while not mark.exists():
            time.sleep(PATIENCE_SECONDS)
        return 0.0

    return task


def comparison(samples: Samples, tokens: int, version: str) -> dict[str, Any]:
    """Tokens per second of each form, and how many times its speed ours is."""
    rows = {}
    for name in samples.seconds:
        if name.startswith("torch, "):
            least, median = samples.ratio(name, "step")
            rows[name.removeprefix("torch, ")] = {
                "tokens_per_second": {"best": tokens / samples.least(name), "median": tokens / samples.median(name)},
                "ours_is_times": {"least": least, "median": median},
            }
    return {"torch": version, "forms": rows}


def comparison_lines(facts: Mapping[str, Any]) -> Sequence[str]:
    """For the report."""
    found = facts.get("against")
    if not found:
        return []
    lines = ["", f"PyTorch {found['torch']}, the same model, batch, ranks and one thread a rank, in turn with ours:"]
    for form, row in found["forms"].items():
        speed, times = row["tokens_per_second"], row["ours_is_times"]
        lines.append(
            f"  {form:12}{speed['best']:10.0f} tokens/s (median {speed['median']:.0f}); ours is {times['least']:.2f} "
            f"times as fast (least by least), {times['median']:.2f} (median of paired ratios)"
        )
    return lines


def _started(words: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    except OSError as error:
        raise LaunchError(f"--peer-python: can't start {words[0]}: {error.strerror}") from None


def free_port() -> int:
    """Of this host, at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
