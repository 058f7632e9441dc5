r"""Exercises of the course, checked: questions with hidden answers, and a game of planted faults.

    python examples/check.py --list                 what there is
    python examples/check.py 03                     the exercises of example 03
    python examples/check.py breaks                 a planted fault to find: the tools, your answer, the score
    python examples/check.py breaks 7               fault number 7
    printf '2\nV\n3 3 2\n' | python examples/check.py 02        answers from a pipe, a line each

No answer is written down: each is computed by the library when it is asked for. A wrong one gets a hint and a second
try; then comes the reason. Reasons are stored with letters turned by 13 and digits by 5, so that nobody reads them by
accident.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # as a script it finds its neighbours; they call themselves examples.*

from mpitp.backend.threads import limit_blas_threads  # noqa: E402
from mpitp.comm.abort import INTERRUPTED  # noqa: E402

USAGE = "usage: check.py --list | EXAMPLE | breaks [NUMBER]      (python examples/check.py --list names the examples)"
BLANK = "___"
POINTS = (2, 1)  # for the first try, the second
TURNED = str.maketrans(
    {
        x: part[(i + len(part) // 2) % len(part)]
        for part in (ascii_lowercase, ascii_uppercase, digits)
        for i, x in enumerate(part)
    }
)


def say(text: str = "", indent: str = "") -> None:
    """Print, in lines of 80 columns."""
    width = 80 - len(indent)
    for line in text.split("\n"):
        print(textwrap.indent("\n".join(textwrap.wrap(line, width, break_on_hyphens=False)) or "", indent))


def answers() -> Iterator[str]:
    """Lines from the terminal or a pipe, until it ends; what a pipe says is shown, as a terminal would."""
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return
        if not sys.stdin.isatty():
            print(line.rstrip("\n"))
        yield line.strip()


def told(answer: Any) -> str:
    """An answer as people write it."""
    if isinstance(answer, list | tuple):
        return " ".join(map(told, answer))
    return f"{answer:.4g}" if isinstance(answer, float) else str(answer)


def is_right(given: str, answer: Any) -> bool:
    """Whole numbers and words must be equal, other numbers to one part in a hundred; commas may part them."""
    words, wanted = given.replace(",", " ").lower().split(), answer if isinstance(answer, list | tuple) else [answer]
    return len(words) == len(wanted) and all(map(_is_one, words, wanted))


def _is_one(word: str, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return word == wanted.lower()
    if not _is_number(word):
        return False
    return abs(float(word) - wanted) <= (0.01 * abs(wanted) if isinstance(wanted, float) else 0)


def expected(given: str, answer: Any) -> str | None:
    """What kind of answer is asked for, where `given` is none of its kind; that is no try, and costs nothing."""
    words, wanted = given.replace(",", " ").lower().split(), answer[0] if isinstance(answer, list | tuple) else answer
    if not isinstance(wanted, str):
        return None if words and all(map(_is_number, words)) else "numbers" if wanted is not answer else "a number"
    if wanted in ("yes", "no"):
        return None if words in (["yes"], ["no"]) else "yes or no"
    if len(wanted) == 1:
        return None if len(words) == 1 and len(words[0]) == 1 and words[0].isalpha() else "a letter"
    return None if words and not any(map(_is_number, words)) else "a word"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def revealed(text: str) -> str:
    """A stored reason, turned back."""
    return text.translate(TURNED)


def ask(exercise: Any, lines: Iterator[str]) -> int | None:
    """Points for one question; None where the answers have ended."""
    say(exercise.question)
    answer = exercise.answer()
    for points in POINTS:
        given = next(lines, None)
        while given is not None and (kind := expected(given, answer)):
            say(f"That is not an answer; {kind}, please.", "  ")
            given = next(lines, None)
        if given is None:
            return None
        if is_right(given, answer):
            say(f"Right. {revealed(exercise.why)}", "  ")
            return points
        say(f"Not so. A hint: {exercise.hint}" if points != POINTS[-1] else "Not so either.", "  ")
    say(f"It is {told(answer)}. {revealed(exercise.why)}", "  ")
    return 0


def table() -> dict[str, list[Any]]:
    """All exercises, by the example's number or name."""
    from examples.exercises import EXERCISES
    from examples.mesh_exercises import MESH_EXERCISES

    return EXERCISES | MESH_EXERCISES


def blank(name: str, number: int, answer: Any) -> None:
    """A notebook's blank: say whether an answer is right, and why; a hint where it isn't."""
    exercise = table()[name][number - 1]
    if answer == BLANK:
        say(f"Put your answer in the place of {BLANK}, and run the cell.")
    elif is_right(told(answer), exercise.answer()):
        say(f"Right. {revealed(exercise.why)}")
    else:
        say(f"Not so. A hint: {exercise.hint}")


def check(name: str, exercises: list[Any], title: str) -> None:
    """Ask all questions of an example, and tell the score."""
    say(f"{name}  {title}\n")
    lines, score = answers(), 0
    for number, exercise in enumerate(exercises, 1):
        say(f"{number} of {len(exercises)}")
        points = ask(exercise, lines)
        if points is None:
            break
        score += points
        say()
    say(f"SCORE  {score} of {POINTS[0] * len(exercises)}")


def listing(every: dict[str, list[Any]], titles: dict[str, str]) -> None:
    """What there is."""
    for name, exercises in every.items():
        print(f"{name:<20} {len(exercises)}  {titles[name]}"[:80].rstrip())
    print(f"{'breaks':<20} a game: a planted fault to find with the tools")


def title_of(path: Path) -> str:
    """The first line of an example's docstring, without its number."""
    line = path.read_text(encoding="utf-8").split('"""')[1].split("\n")[0]
    return line[4:] if line[:2].isdecimal() else line


def main(words: list[str]) -> None:
    from examples import breaks

    limit_blas_threads(1)
    every = table()
    paths = {name: next(HERE.glob(f"{name}_*.py" if name.isdecimal() else f"{name}.py")) for name in every}
    titles = {name: title_of(path) for name, path in paths.items()}
    if words == ["--list"]:
        listing(every, titles)
    elif len(words) == 1 and words[0] in every:
        check(words[0], every[words[0]], titles[words[0]])
    elif words[:1] == ["breaks"] and len(words) < 3 and all(number in breaks.NUMBERS for number in words[1:]):
        breaks.play(words[1] if len(words) == 2 else None, answers())
    else:
        sys.exit(USAGE)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(INTERRUPTED)
