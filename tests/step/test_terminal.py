"""`mpitp step` in a real pseudo-terminal of 80 by 24, and driven from a pipe."""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitp.errors import UsageError
from mpitp.step.command import add_arguments, run

ROOT = Path(__file__).resolve().parents[2]
CLEAR = "\x1b[H\x1b[2J"
SESSIONS: list[Session] = []


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """A test that fails half way ends its program all the same."""
    yield
    while SESSIONS:
        process = SESSIONS.pop().process
        process.kill()
        process.wait()


class Session:
    """The command in a terminal, its screen as a reader sees it."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "", "LINES": "", **environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpitp", "step", *arguments],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.text = ""
        SESSIONS.append(self)

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """The newest screen, once it contains `text`."""
        end = time.monotonic() + seconds
        while text not in self.screen():
            assert time.monotonic() < end, f"no {text!r} on the screen:\n{self.screen()}"
            self._read(0.2)
        while self._read(0.5):  # a screen may come in pieces
            pass
        return self.screen()

    def _read(self, seconds: float) -> bool:
        """Read what comes within these seconds; whether something came."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        self.text += os.read(self.master, 65536).decode(errors="replace")
        return True

    def screen(self) -> str:
        return self.text.rpartition(CLEAR)[2]

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def end(self) -> int:
        """The exit code; whatever is still written is read, and the terminal must be as it was."""
        end = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < end, "it doesn't end"
            self._read(0.1)
        while self._read(0):
            pass
        assert termios.tcgetattr(self.slave) == self.before
        os.close(self.master)
        os.close(self.slave)
        return self.process.returncode


def test_walking_in_a_terminal() -> None:
    session = Session()
    first = session.wait_for("1/55 forward  embedding")
    assert "q quit" in first and "g go to" in first
    session.send("\x1b[C")  # the right arrow
    session.wait_for("2/55 forward  embedding: ALL_REDUCE SUM")
    session.send("\x1b[D")
    session.wait_for("1/55")
    session.send("bheads\x7fs\rc")
    session.wait_for("5/55 forward  blocks.0.attention.heads")
    session.send("j")
    session.wait_for("36/55 backward")
    session.send("g7\r")
    session.wait_for("7/55 forward  blocks.0.attention.out: ALL_REDUCE SUM")
    session.send("tn")
    session.wait_for("your answer:")
    session.send("n\r")
    session.wait_for("right: no, every rank works by itself")
    session.send("l")
    session.wait_for("blocks.0.attention.out")
    session.send(" qq")
    assert session.end() == 0
    assert "score: 1 of 1" in session.text
    assert "\x1b[1m" in session.text, "bold where it is welcome"
    assert session.text.count("\x1b[?1049h") == session.text.count("\x1b[?1049l") == 1


@pytest.mark.parametrize("last", ["q", "\x03", "\x04"], ids=["q", "Ctrl-C", "Ctrl-D"])
def test_quits_cleanly_and_needs_no_colour(last: str) -> None:
    session = Session("-n", "2", NO_COLOR="1")
    screen = session.wait_for("q quit")
    assert max(map(len, screen.split("\r\n"))) <= 80 and len(screen.split("\r\n")) <= 24
    session.send(last)
    assert session.end() == 0
    assert "\x1b[1m" not in session.text and "Traceback" not in session.text


def step(*arguments: str, keys: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-m", "mpitp", "step", *arguments]
    return subprocess.run(command, input=keys, env=env, capture_output=True, text=True, timeout=60)


def test_keys_from_a_pipe() -> None:
    result = step(keys="xxj\nq")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    screens = result.stdout.split("-" * 80 + "\n")
    assert [screen.splitlines()[1].split()[0] for screen in screens[:4]] == ["1/55", "2/55", "7/55", "34/55"]
    ended = step("--predict", keys="ny\nn")
    assert ended.returncode == 0 and "score: 1 of 1" in ended.stdout, "the end of input ends it"


def test_printing_and_mistakes() -> None:
    assert "all_reduce sum of 64 B a rank" in step("--list").stdout
    shown = step("--show", "7").stdout
    assert "y = sum_r y_partial" in shown and "partial: to be summed" in shown
    for arguments, said in [
        (("--show", "99"), "there is no operation 99"),
        (("--break", "nothing"), "no layer's name contains"),
        (("--model", "nowhere", "--set", "a=1"), "--set changes a config"),
        (("--block", "1"), "--block says which block of --model"),
    ]:
        result = step(*arguments)
        assert result.returncode == 2 and said in result.stderr, result.stderr


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UsageError, match="run it alone, with -n for the ranks"):
        run(parser.parse_args([]))


def test_a_terminal_that_changes_its_size_is_drawn_anew() -> None:
    """While a key is waited for, and while an answer is typed, which stays."""
    session = Session()
    session.wait_for("n next")
    session.resize(rows=30, columns=44)
    session.wait_for("a terminal of 80 by 24 shows all of it"[:44])
    session.send("g1")
    session.wait_for("(1 to 55): 1")
    session.resize(rows=24, columns=80)
    assert "x next collective" not in session.wait_for("go to operation (1 to 55): 1").rpartition("\n")[2]
    session.send("2\r")
    session.wait_for("12/55")
    session.send("q")
    assert session.end() == 0


def test_any_key_goes_back_from_a_page_and_the_place_is_kept() -> None:
    session = Session("--at", "5")
    session.wait_for("5/55")
    for page in ("l", "?"):
        session.send(page)
        session.wait_for("goes back")
        session.send("q")
        session.wait_for("5/55")
    session.send("q")
    assert session.end() == 0


def test_what_is_no_answer_is_asked_again_and_does_not_count() -> None:
    session = Session("--predict", "--at", "3")
    session.wait_for("3/55")
    session.send("n")
    session.wait_for("Which shape")
    session.send("1a\r")
    session.wait_for("'1a' is no answer; numbers, like 4, 6 (empty: take it back):")
    session.send("\r")
    session.wait_for("taken back: n asks again")
    session.send("n4, 4\r")
    session.wait_for("4/55")
    session.send("q")
    assert session.end() == 0
    assert "of 1" in session.text.splitlines()[-1]
