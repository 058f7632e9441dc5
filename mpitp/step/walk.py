"""Walking through a film by keys: where one stands, what is shown, breakpoints, predictions. Knows no terminal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mpitp.step.film import Film, Op
from mpitp.step.questions import Question, question_about
from mpitp.step.rows import row_lines
from mpitp.step.screen import (
    HEIGHT,
    KEYS,
    SHORT_KEYS,
    WIDTH,
    View,
    example_lines,
    help_lines,
    list_lines,
    op_lines,
    send_lines,
    why_lines,
    wrapped,
)

COLLECTIVES = "collectives"
RESIZED = "resized"  # a key that changes nothing: the screen has another size and is drawn anew
LEAST_WIDTH, LEAST_HEIGHT = 40, 12  # one that shows something


@dataclass(slots=True)
class Walk:
    """One reader's way through `film`. `prompt`: what the next line of input answers; "": the next key is a command."""

    film: Film
    number: int = 1
    view: View = field(default_factory=View)
    breakpoints: list[str] = field(default_factory=list)
    predicts: bool = False
    asked: int = 0
    right: int = 0
    prompt: str = ""
    message: str = ""
    page: list[str] | None = None  # help or list, instead of the operation
    is_over: bool = False
    question: Question | None = None
    _top: int = 0
    _page_lines: int = 20  # that the terminal has shown
    _width: int = WIDTH  # in columns

    @property
    def op(self) -> Op:
        """The operation at hand."""
        return self.film.op(self.number)

    def press(self, key: str) -> None:
        """A key that is a command."""
        if self.page is not None:
            self._turn_page(key)
            return
        if key == RESIZED:
            return
        self.message = ""
        actions = {
            "n": self._next, " ": self._next, "right": self._next,
            "p": lambda: self._go(self.number - 1), "left": lambda: self._go(self.number - 1),
            "c": lambda: self._run(1), "C": lambda: self._run(-1),
            "x": lambda: self._seek(1, COLLECTIVES), "X": lambda: self._seek(-1, COLLECTIVES),
            "j": self._to_conjugate,
            "g": lambda: self._ask(f"go to operation (1 to {len(self.film.ops)}): "),
            "a": lambda: self._array(1), "A": lambda: self._array(-1),
            "r": self._rank, "v": self._shades,
            "b": lambda: self._ask("breakpoint at a layer's name, or collectives (again: clear): "),
            "t": self._toggle_predict,
            "w": lambda: self._open(why_lines(self.op)), "s": self._sends,
            "e": lambda: self._open(example_lines(self.op)),
            "l": lambda: self._open(list_lines(self.film)),
            "m": lambda: self._open(row_lines(self.film, self._width, self.number)),
            "?": lambda: self._open(help_lines()), "h": lambda: self._open(help_lines()),
            "q": self._quit,
        }  # fmt: skip
        action = actions.get(key)
        if action is None:
            self.message = f"no such key: {key!r}; ? shows what there is"
            return
        action()

    def answer(self, line: str) -> None:
        """The line that was asked for by `prompt`."""
        prompt, self.prompt = self.prompt, ""
        if self.question is not None:
            self._judge(line)
        elif prompt.startswith("go to"):
            self._go_to(line.strip())
        elif line.strip():
            self._toggle_breakpoint(line.strip())

    def lines(self, width: int, height: int) -> list[str]:
        """The whole screen, at most `height` lines; the last one is the prompt or a message."""
        if width < LEAST_WIDTH or height < LEAST_HEIGHT:
            needed = f"mpitp step needs {LEAST_WIDTH} columns and {LEAST_HEIGHT} lines at least"
            short = wrapped(
                f"{needed}; this terminal has {width} and {height}. Enlarge it and press a key; q quits.", width
            )
            return [line[:width] for line in short[:height]]
        self._width = width
        last = self.prompt or self.message
        if self.page is not None:
            self._page_lines = room = height - 2
            more = len(self.page) - self._top - room
            foot = f"{more} more lines: space; any other key goes back" if more > 0 else "any key goes back"
            return [line[:width] for line in [*self.page[self._top : self._top + room], "", foot]]
        if self.question is not None:
            return [line[:width] for line in [*self._question_lines(width)[: height - 2], "", last]]
        is_small = width < WIDTH or height < HEIGHT
        keys = [key[:width] for key in (SHORT_KEYS if is_small else KEYS)]
        room = height - 3 - len(keys)
        body = op_lines(self.film, self.op, self.view, width, room)
        last = last or (f"a terminal of {WIDTH} by {HEIGHT} shows all of it" if is_small else "")
        return [self._status()[:width], *body, "", *keys, last[:width]]

    def _status(self) -> str:
        parts = ["mpitp step"]
        if self.predicts or self.asked:
            parts.append(f"score {self.right}/{self.asked}")
        if self.breakpoints:
            parts.append("breaks: " + ", ".join(self.breakpoints))
        parts.append(self.film.title)
        return "  ".join(parts)

    def _question_lines(self, width: int) -> list[str]:
        assert self.question is not None
        lines = [self._status(), "", "predict:"]
        for text in self.question.text.splitlines():
            lines += wrapped(f"  {text}", width)
        return lines

    def _next(self) -> None:
        if self.number == len(self.film.ops):
            self.message = "this was the last operation"
        elif self.predicts:
            self.question = question_about(self.film.op(self.number + 1))
            self.prompt = "your answer: "
        else:
            self._go(self.number + 1)

    def _judge(self, line: str) -> None:
        assert self.question is not None
        question, self.question = self.question, None
        if not line.strip():
            self.message = "taken back: n asks again"
            return
        if not question.is_answer(line):
            self.question = question
            self.prompt = f"{line.strip()!r} is no answer; {question.hint} (empty: take it back): "
            return
        is_right = question.is_right(line)
        self.asked, self.right = self.asked + 1, self.right + is_right
        self._go(self.number + 1)
        self.message = f"{'right' if is_right else 'not quite'}: {question.answer}"

    def _go(self, number: int) -> None:
        if not 1 <= number <= len(self.film.ops):
            self.message = "this is the first operation" if number < 1 else "this was the last operation"
            return
        self.number = number
        self.view = replace(self.view, array=None)

    def _go_to(self, text: str) -> None:
        if text.isdecimal() and 1 <= int(text) <= len(self.film.ops):
            self._go(int(text))
        elif text:
            self.message = f"{text!r} is not a number from 1 to {len(self.film.ops)}"

    def _seek(self, direction: int, breakpoint: str) -> None:
        found = self._next_at(direction, [breakpoint])
        if found:
            self._go(found)
        else:
            self.message = f"no {'more' if direction > 0 else 'earlier'} {breakpoint}"

    def _run(self, direction: int) -> None:
        if not self.breakpoints:
            self.message = "no breakpoint is set: b sets one"
            return
        found = self._next_at(direction, self.breakpoints)
        self._go(found or (len(self.film.ops) if direction > 0 else 1))
        self.message = self.message if found else "no further breakpoint on this way"

    def _next_at(self, direction: int, breakpoints: list[str]) -> int:
        """The next operation on this way that one of them names; 0: there is none."""
        ahead = self.film.ops[self.number :] if direction > 0 else self.film.ops[: self.number - 1][::-1]
        return next((op.number for op in ahead if any(is_at(op, each) for each in breakpoints)), 0)

    def _to_conjugate(self) -> None:
        if self.op.conjugate is None:
            self.message = "nothing in the other pass is its conjugate"
        else:
            self._go(self.op.conjugate)

    def _ask(self, prompt: str) -> None:
        self.prompt = prompt

    def _array(self, direction: int) -> None:
        arrays = self.op.arrays
        now = arrays.index(self.op.made) if self.view.array is None else self.view.array
        self.view = replace(self.view, array=(now + direction) % len(arrays))

    def _rank(self) -> None:
        rank = self.view.rank
        last = len(self.op.ranks) - 1
        self.view = replace(self.view, rank=0 if rank is None else rank + 1 if rank < last else None)

    def _shades(self) -> None:
        self.view = replace(self.view, shades=not self.view.shades)

    def _toggle_breakpoint(self, name: str) -> None:
        if name in self.breakpoints:
            self.breakpoints.remove(name)
            self.message = f"breakpoint {name} cleared"
        elif not any(is_at(op, name) for op in self.film.ops):
            self.message = f"no layer's name contains {name!r}; l lists them"
        else:
            self.breakpoints.append(name)
            self.message = f"breakpoint {name} set: c runs to it"

    def _toggle_predict(self) -> None:
        self.predicts = not self.predicts
        self.message = "predict: n asks before it shows" if self.predicts else "predict is off"

    def _open(self, page: list[str]) -> None:
        self.page, self._top = page, 0

    def _sends(self) -> None:
        if self.op.collective:
            self._open(send_lines(self.op))
        else:
            self.message = "nothing is sent here: x goes to the next collective"

    def _turn_page(self, key: str) -> None:
        assert self.page is not None
        if key == " " and self._top + self._page_lines < len(self.page):
            self._top += self._page_lines
        elif key != RESIZED:
            self.page = None

    def _quit(self) -> None:
        self.is_over = True


def is_at(op: Op, breakpoint: str) -> bool:
    """Whether an operation is one that the breakpoint names."""
    return bool(op.collective) if breakpoint == COLLECTIVES else breakpoint in op.layer
