"""Stays the parent of an mpiexec: what it prints, the signals and the exit code go through here, alike for every MPI.

Left to themselves the launchers differ: Open MPI's kills the ranks a quarter of a second after a TERM, too short to
save in; MPICH's gives the number of the signal that killed a rank as the exit code (9), Open MPI's 128 more; and after
Ctrl-C, or when a reader has left (`mpitp launch ... | head`), MPICH's has whatever code comes first, even 255.

The mpiexec runs in a process group of its own, so that a signal for the group comes here first, once.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mpitp.comm.deaths import end_with_parent
from mpitp.errors import LaunchError
from mpitp.files import os_failure
from mpitp.launch.escalation import Escalation

TAIL_BYTES = 1 << 14
KILLED = 128  # a process that was ended by signal N counts as one that left with 128 + N, as in a shell
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the job is over, and the code says so
_PASSED_ON = (*_ENDING, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)
STOPPED_ITSELF = (0, 75)  # done, or saved before it ended: the job's own word, whatever it was told
_PATIENCE_SECONDS = 0.3  # for output that is still under way when the launcher has ended
_LEAVE_SECONDS = 10.0  # for a launcher that was told to end
_MPICH_KILLED = re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .* \(signal (\d+)\)")
# Of each kind of mpiexec: signals that end the job when it gets them, and those that it hands on to the ranks.
_DEADLY_AND_SAFE = {
    "open mpi": (("TERM", "INT", "HUP"), ("USR1", "USR2")),
    "hydra": (("HUP", "USR2"), ("USR1", "TERM", "INT")),
}


@dataclass(slots=True)
class Job:
    """One run of an mpiexec.

    `passed_as`: signals that are handed on as others. `saves_on_int`: an INT asks it to save, or to finish its texts,
    which takes as long as it takes. `outlives_reader`: it goes on when its output can't be handed on.
    `stdin`: as for `subprocess.Popen`; None: this process's own. `tail` is the end of what came on stdout.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    stdin: int | None = subprocess.DEVNULL
    passed_as: Mapping[int, int] = field(default_factory=dict)
    saves_on_int: bool = False
    outlives_reader: bool = False
    tail: str = ""
    was_ended_here: bool = False  # by `kill`
    _is_mid_line: bool = False  # on stderr: a progress bar stands there
    _process: subprocess.Popen[bytes] | None = None
    _received: list[int] = field(default_factory=list)
    _waiting: list[int] = field(default_factory=list)  # received before there was anybody to hand them to
    _output_lost: OSError | None = None
    _escalation: Escalation = field(init=False)

    def __post_init__(self) -> None:
        self._escalation = Escalation(self._insist)

    @property
    def pid(self) -> int | None:
        """Of the mpiexec, once it is started."""
        return None if self._process is None else self._process.pid

    @property
    def was_killed(self) -> bool:
        """Whether the mpiexec itself was ended by a signal."""
        return self._process is not None and (self._process.returncode or 0) < 0 and not self.was_ended_here

    def kill(self) -> None:
        """End the mpiexec at once."""
        if self._process is not None:
            self.was_ended_here = True
            self._process.kill()

    @property
    def was_told_to_end(self) -> bool:
        """Whether a signal that ends a job has come."""
        return any(number in _ENDING for number in self._received)

    @property
    def ranks_heeded_signal(self) -> bool:
        """Whether the ranks died of a signal that has come here, as the launcher tells it (MPICH's does)."""
        killed = _MPICH_KILLED.search(self.tail)
        return killed is not None and int(killed[1]) in [self.passed_as.get(told, told) for told in self._received]

    def run(self) -> int:
        """Run it to its end; the exit code, as docs/cluster.md has them.

        When its output can't be handed on it is ended, and that raised: BrokenPipeError when the reader has left, else
        FileError. Raises LaunchError when it can't be started.
        """
        with self._listening():
            self._process = self._start()
            for number in self._waiting:
                self._hand_on(number)
            self.tail = self._relay(self._process).decode(errors="replace")
            code = self._wait(self._process)
        if code < 0 and not self._received and self._output_lost is None and not self.was_ended_here:
            name = Path(self.command[0]).name
            self.say(f"{name} (process {self.pid}) has died of {_name(-code)}: killed, or out of memory?")
        if isinstance(self._output_lost, BrokenPipeError):
            raise self._output_lost
        if self._output_lost is not None:
            raise os_failure("write to", "standard output", self._output_lost)
        return exit_code(code, self.tail, self._received)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.command,
                env=dict(self.environ),
                stdin=self.stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=None if self._shares_terminal() else 0,
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:  # such as a prompt that is too long for a command line
            raise LaunchError(f"can't start {self.command[0]}: {error.strerror or error}") from error

    def say(self, text: str) -> None:
        """A line of our own on stderr, below what the job has written there. A signal may come in the middle of it."""
        line = f"mpitp launch: {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, ("\n" + line if self._is_mid_line else line).encode(errors="backslashreplace"))
        self._is_mid_line = False

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Handlers while the job runs. What was ignored before (by nohup, or for a job in the background) stays so."""
        heard = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        if self._process is not None:
            self._hand_on(number)
        else:
            self._waiting.append(number)

    def _hand_on(self, number: int) -> None:
        assert self._process is not None
        other = self.passed_as.get(number, number)
        if other != number:
            self.say(f"{_name(number)} is handed on as {_name(other)}")
        if not (self._shares_terminal() and number in (signal.SIGINT, signal.SIGTSTP)):  # sent to both by the terminal
            self._process.send_signal(other)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == signal.SIGINT and not self.saves_on_int:
            self._escalation.begin()

    def _insist(self, number: signal.Signals) -> None:
        assert self._process is not None
        self.say(f"the job has not ended: {_name(number)} follows")
        if number == signal.SIGKILL and not self._shares_terminal():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        self._process.send_signal(number)

    def _shares_terminal(self) -> bool:
        """Whether the job reads from our terminal: a group in the background would be stopped for it."""
        return self.stdin is None and sys.stdin is not None and sys.stdin.isatty()

    def _relay(self, process: subprocess.Popen[bytes]) -> bytes:
        """Copy its output to ours as it comes; the end of what came on stdout."""
        assert process.stdout is not None and process.stderr is not None
        tail = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, 1)
            selector.register(process.stderr, selectors.EVENT_READ, 2)
            while selector.get_map():
                ready = selector.select(_PATIENCE_SECONDS)
                self._escalation.go_on()
                if not ready and process.poll() is not None:
                    break  # a process that it has left behind holds the pipes open
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.data == 1:
                        tail = (tail + data)[-TAIL_BYTES:]
                    else:
                        self._is_mid_line = not data.endswith(b"\n")
                    self._write(key.data, data)
        process.stdout.close()
        process.stderr.close()
        return tail

    def _write(self, descriptor: int, data: bytes) -> None:
        if self._output_lost is not None:
            return
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            is_told = descriptor == 2 and not isinstance(error, BrokenPipeError)  # by what is missing there
            if not self.outlives_reader and not is_told and self._process is not None:
                self._output_lost = error
                self._process.terminate()

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        if self._output_lost is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LEAVE_SECONDS)
            process.kill()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_PATIENCE_SECONDS)
            self._escalation.go_on()


def exit_code(code: int, tail: str, received: Sequence[int]) -> int:
    """What the launcher's exit code stands for, given the end of its stdout and the signals that came meanwhile."""
    if code in STOPPED_ITSELF:
        return code
    for number in received:
        if number in _ENDING:
            return KILLED + number
    if code < 0:
        return KILLED - code
    killed = _MPICH_KILLED.search(tail)
    return KILLED + int(killed[1]) if killed else code


def passed_as(launcher: str, heeded: Sequence[str]) -> dict[int, int]:
    """Under which other signal a job that ends in order on those in `heeded` ("TERM", ...) must be told of one.

    Open MPI's mpiexec kills the ranks after a TERM, INT or HUP of its own, and hands USR1 and USR2 on to them; MPICH's
    (hydra) dies of a HUP or USR2, and the ranks with it. Where none that is handed on is heeded, nothing can be done.
    """
    deadly, safe = _DEADLY_AND_SAFE.get(launcher, ((), ()))
    told = [name for name in safe if name in heeded]
    if not told:
        return {}
    return {signal.Signals[f"SIG{name}"]: signal.Signals[f"SIG{told[0]}"] for name in deadly if name in heeded}


def _name(number: int) -> str:
    return signal.Signals(number).name
