"""The stepper in a terminal, or driven by keys from a pipe. Only the standard library, no colour needed."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TextIO

from mpitp.step.walk import RESIZED, Walk

_ARROWS = {"[C": "right", "[D": "left", "OC": "right", "OD": "left", "[B": "right", "[A": "left"}
_CLEAR, _ALTERNATE, _BACK = "\x1b[H\x1b[2J", "\x1b[?1049h", "\x1b[?1049l"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_LEAVE = ("", "\x03", "\x04")  # the end of input, Ctrl-C, Ctrl-D
LOCAL_MODES = 3  # where termios keeps them


class Terminal(ABC):
    """Where keys come from and screens go. End of input is None."""

    @abstractmethod
    def key(self) -> str | None:
        """The next key: a character, or "left" or "right"."""

    @abstractmethod
    def line(self, prompt: str) -> str | None:
        """A line of text, typed after the prompt that the screen ends with."""

    @abstractmethod
    def show(self, walk: Walk) -> None:
        """Draw the screen."""


def run(walk: Walk) -> int:
    """Walk until the reader quits, by q, Ctrl-C or the end of input."""
    with contextlib.suppress(KeyboardInterrupt), _terminal() as terminal:
        while not walk.is_over:
            terminal.show(walk)
            if walk.prompt:
                line = terminal.line(walk.prompt)
                if line is None:
                    break
                walk.answer(line)
                continue
            key = terminal.key()
            if key is None:
                break
            walk.press(key)
    if walk.asked:
        print(f"score: {walk.right} of {walk.asked}")
    return 0


@contextlib.contextmanager
def _terminal() -> Iterator[Terminal]:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield Pipe(sys.stdin, sys.stdout)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # keys come one by one
        modes = termios.tcgetattr(descriptor)
        modes[LOCAL_MODES] &= ~termios.ISIG  # Ctrl-C too: a signal could strike where an exception is lost
        termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
        sys.stdout.write(_ALTERNATE)
        with _resizes() as resized:
            yield Screen(descriptor, sys.stdout, resized, has_colour=wants_colour())
    finally:
        sys.stdout.write(_PLAIN + _BACK if wants_colour() else _BACK)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizes() -> Iterator[int]:
    """A descriptor from which a byte can be read for every change of the terminal's size."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)

    def on_change(signum: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of changes that nobody has looked at yet
            os.write(tell, b"r")

    is_main = threading.current_thread() is threading.main_thread()  # signals come to no other
    before = signal.signal(signal.SIGWINCH, on_change) if is_main else None
    try:
        yield told
    finally:
        if is_main:
            signal.signal(signal.SIGWINCH, before)
        os.close(told)
        os.close(tell)


def wants_colour() -> bool:
    """Whether bold and the like are welcome: not with NO_COLOR (https://no-color.org), nor on a dumb terminal."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class Pipe(Terminal):
    """Keys from a file or a pipe, screens one after the other. Line ends count for answers only."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self.source, self.sink = source, sink

    def key(self) -> str | None:
        while (key := self.source.read(1)) in ("\n", "\r"):
            pass
        return key or None

    def line(self, prompt: str) -> str | None:
        line = self.source.readline()
        return line.rstrip("\n") if line else None

    def show(self, walk: Walk) -> None:
        self.sink.write("\n".join(line.rstrip() for line in walk.lines(80, 24)) + "\n" + "-" * 80 + "\n")
        self.sink.flush()


class Screen(Terminal):
    """A terminal in cbreak mode: the whole screen is drawn anew for each key, which is little over any ssh."""

    def __init__(self, descriptor: int, sink: TextIO, resized: int, *, has_colour: bool) -> None:
        self.descriptor, self.sink, self.resized, self.has_colour = descriptor, sink, resized, has_colour
        self._walk: Walk | None = None  # what the screen shows

    def key(self) -> str | None:
        character = self._read()
        if character in _LEAVE:
            return None
        if character != "\x1b":
            return {"\n": "n", "\r": "n"}.get(character, character)
        rest = ""
        while len(rest) < 2 and select.select([self.descriptor], [], [], 0.05)[0]:
            rest += self._read()
        return _ARROWS.get(rest, "escape")

    def line(self, prompt: str) -> str | None:
        typed = ""
        while True:
            character = self._read()
            if character in _LEAVE:
                return None
            if character in ("\n", "\r"):
                return typed
            if character == RESIZED and self._walk is not None:
                self.show(self._walk)
                self._write(typed)
                continue
            if character == "\x1b":  # taken back
                return ""
            if character in ("\x7f", "\b"):
                if typed:
                    typed = typed[:-1]
                    self._write("\b \b")
            elif character.isprintable():
                typed += character
                self._write(character)

    def show(self, walk: Walk) -> None:
        self._walk = walk
        columns, rows = shutil.get_terminal_size((80, 24))
        lines = walk.lines(columns, rows)
        if self.has_colour and walk.page is None and len(lines) > 1:
            lines[1] = f"{_BOLD}{lines[1]}{_PLAIN}"
        self._write(_CLEAR + "\r\n".join(lines))

    def _read(self) -> str:
        """A character, or RESIZED."""
        if self.resized in select.select([self.descriptor, self.resized], [], [])[0]:
            os.read(self.resized, 4096)
            return RESIZED
        return os.read(self.descriptor, 1).decode(errors="replace")

    def _write(self, text: str) -> None:
        self.sink.write(text)
        self.sink.flush()
