"""Exercises with hidden answers, and the game of planted faults: what they ask, accept and give away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import breaks, check
from examples.exercises import EXERCISES
from examples.mesh_exercises import MESH_EXERCISES
from examples.planted_bugs import FAULTS

EXAMPLES = Path(check.__file__).resolve().parent
ALL = EXERCISES | MESH_EXERCISES
# What the library must say, counted by hand.
ANSWERS = {
    "01": ["3 2 2 2", "20", "V"],
    "02": ["1", "P", "3 3 2"],
    "03": ["b", "96", "1"],
    "04": ["1 2", "2", "8"],
    "05": ["34 50", "3", "2"],
    "06": ["2 2", "3"],
    "07": ["4.16", "yes"],
    "08": ["0", "3", "5"],
    "09": ["128", "1600"],
    "10": ["8", "3"],
    "11": ["2", "1.26"],
    "12": ["7", "numbers"],
    "13": ["2 2 1", "3.5", "2000"],
    "14": ["3 2 2", "R", "yes"],
    "15": ["27.3", "8 4", "9"],
    "16": ["0 1 10 11", "0.693", "3"],
    "17": ["3 2 2", "60", "yes"],
    "18": ["16", "dp"],
    "19": ["2", "2", "16 16"],
    "your_own_layer": ["2", "refused"],
    "your_own_model": ["no"],
    "your_own_all_reduce": ["yes", "no"],
}


def run(*words: str, answers: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "check.py"), *words]
    return subprocess.run(command, input=answers, capture_output=True, text=True, timeout=100)


def test_every_example_has_exercises() -> None:
    scripts = sorted(EXAMPLES.glob("[0-9][0-9]_*.py")) + sorted(EXAMPLES.glob("your_own_*.py"))
    names = {path.name[:2] if path.name[0].isdecimal() else path.stem for path in scripts}
    assert names == set(ALL) == set(ANSWERS)


@pytest.mark.parametrize("name", ALL)
def test_answers_are_those_counted_by_hand(name: str) -> None:
    assert len(ANSWERS[name]) == len(ALL[name])
    for exercise, by_hand in zip(ALL[name], ANSWERS[name], strict=True):
        answer = exercise.answer()
        assert check.is_right(by_hand, answer) and check.is_right(check.told(answer), answer)
        assert check.expected(by_hand, answer) is None
        for wrong in ("", "x", f"{by_hand} 1", f"7{by_hand}"):
            assert not check.is_right(wrong, answer)


def test_commas_and_capitals_are_no_matter() -> None:
    assert check.is_right("3, 2,2", [3, 2, 2]) and check.is_right("v", "V") and check.is_right("27", 27.27)
    assert not check.is_right("27.6", 27.27) and not check.is_right("3.1", 3)


def test_reasons_are_hidden_in_the_source_and_told_afterwards() -> None:
    source = "".join((EXAMPLES / name).read_text() for name in ("exercises.py", "mesh_exercises.py"))
    for exercises in ALL.values():
        for exercise in exercises:
            why = check.revealed(exercise.why)
            assert len(why) > 20 and why[:20] not in source and check.revealed(why) == exercise.why


def test_right_answers_by_pipe() -> None:
    done = run("02", answers="\n".join(ANSWERS["02"]))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.endswith("SCORE  6 of 6\n") and done.stdout.count("Right.") == 3
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_wrong_answers_get_a_hint_and_then_the_reason() -> None:
    done = run("03", answers="a\nb\n95\n97\n")  # and then the answers end
    assert "Not so. A hint: x was used on every rank" in done.stdout
    assert "It is 96. dx is [3, 4] on every" in done.stdout
    assert done.stdout.endswith("SCORE  1 of 6\n")


def test_what_is_no_answer_is_no_try() -> None:
    done = run("03", answers="1\n\nb\n96 bytes\n96\n1a\n1\n")
    assert done.stdout.count("That is not an answer; a letter, please.") == 2
    assert done.stdout.count("That is not an answer; a number, please.") == 2
    assert done.stdout.endswith("SCORE  6 of 6\n")
    wanted = [check.expected("?", answer) for answer in (3, 0.5, [1, 2], "V", "yes", "dp")]
    assert wanted == ["a number", "a number", "numbers", "a letter", "yes or no", None]
    assert check.expected("3 3", [1, 2, 3]) is None  # too few are wrong: how many there are may be the question


@pytest.mark.parametrize("words", [[], ["00"], ["breaks", "0"], ["breaks", "1", "2"], ["03", "04"]])
def test_wrong_use_is_told(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 1 and done.stderr.startswith("usage: ") and done.stdout == ""


def test_the_list_names_all() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*ALL, "breaks"]
    assert max(map(len, lines)) <= 80


def test_a_blank_of_a_notebook_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for answer in (check.BLANK, "3 2 2", [3, 2, 2, 2], "3, 2, 2, 2"):
        check.blank("01", 1, answer)
        said.append(capsys.readouterr().out.split(".")[0])
    assert said == ["Put your answer in the place of ___, and run the cell", "Not so", "Right", "Right"]


def letter_of(number: int, *, right: bool = True) -> str:
    """Of the planted mistake, or of another one."""
    offered = dict(zip("abc", breaks.choices(number), strict=True))
    mistake = breaks.EVERY[breaks.NAMES[number - 1]].mistake
    return next(letter for letter, text in offered.items() if (text == mistake) == right)


def test_the_game_offers_the_mistake_and_two_that_show_elsewhere() -> None:
    for number, name in enumerate(breaks.NAMES, 1):
        offered, fault = breaks.choices(number), breaks.EVERY[name]
        assert len(set(offered)) == 3 and fault.mistake in offered
        assert len(f"  a  {fault.mistake}") <= 80, "wider than a terminal"
        others = [each for each in breaks.EVERY.values() if each.mistake in set(offered) - {fault.mistake}]
        assert all(other.seen != fault.seen for other in others)


def test_a_game_by_pipe() -> None:
    number = 1 + breaks.NAMES.index("KV gradients not summed")
    wrong, right = letter_of(number, right=False), letter_of(number)
    done = run("breaks", str(number), answers=f"ledger\nledger\nverify\nhuh\n{wrong}\n{right}\n")
    assert done.returncode == 0 and done.stderr == ""
    assert "all_reduce(sum) [2, 21, 4]                              2       1" in done.stdout
    assert "blocks.1.attention.heads (gradient of the input" in done.stdout
    assert done.stdout.count(breaks.HELP) == 2  # at the start, and where it wasn't understood
    assert "No: that one would show first in" in done.stdout
    assert done.stdout.endswith("SCORE  5 of 10\n")  # a tool is paid for once


def test_a_game_of_a_layout_by_pipe() -> None:
    number = 1 + breaks.NAMES.index("gradients averaged over replicas")
    done = run("breaks", str(number), answers=f"verify\ntable\nledger\nlosses\n{letter_of(number)}\n")
    assert done.returncode == 0 and done.stderr == ""
    assert f"Fault {number} of {len(breaks.NAMES)} is planted: gpt2, dp 2 x tp 2." in done.stdout
    assert "along dp: " in done.stdout and "over 0.2 " in done.stdout and "step 2: 1 rank" in done.stdout
    assert done.stdout.endswith("SCORE  6 of 10\n")
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    "name", ["norms not partial", "tied table not summed over stages", "bias added before the scatter"]
)
def test_tools_show_faults_of_layouts(name: str) -> None:
    game = breaks.game_of(1 + breaks.NAMES.index(name))
    seen, said = breaks.EVERY[name].seen, breaks.show_verify(game)
    assert next(iter(seen.values())) in said
    if "types" in seen:
        assert said.startswith("refused: ") and breaks.show_types(game).startswith("they tell")
        assert "refuse" in breaks.show_ledger(game) and "refuse" in breaks.show_table(game)
        assert breaks.show_losses(game).startswith("positions: ")
    else:
        assert "DIFFERENT" in said and breaks.show_types(game) == "they see nothing"


@pytest.mark.parametrize(
    "name",
    [
        *("router not partial under token shards", "auxiliary losses weaker with cp", "scores before the experts"),
        *("equal tokens counted once a rank", "rows back to other tokens"),
    ],
)
def test_tools_show_faults_of_mixtures(name: str) -> None:
    game = breaks.game_of(1 + breaks.NAMES.index(name))
    seen, said = breaks.EVERY[name].seen, breaks.show_verify(game)
    assert next(iter(seen.values())) in said
    assert ("DIFFERENT" in said, said.startswith("refused: ")) == ("types" not in seen, "types" in seen)
    assert breaks.show_types(game).startswith("they tell" if "types" in seen else "they see nothing")
    assert breaks.show_losses(game).startswith(f"{seen['types']}: " if "types" in seen else "step 1: 1 rank")


def test_a_game_of_a_mixture_by_pipe() -> None:
    number = 1 + breaks.NAMES.index("gradient of scores not summed")
    done = run("breaks", str(number), answers=f"ledger\nlosses\nverify\n{letter_of(number)}\n")
    assert done.returncode == 0 and done.stderr == ""
    assert f"Fault {number} of 58 is planted: mixtral, tp 3." in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("all_reduce(sum) [7, 2]")]
    assert [line[-2:] for line in lines] == [["8", "4"]]  # one of two blocks lacks its sum
    assert "blocks.1.mlp.router (gradient of the input" in done.stdout
    assert done.stdout.endswith("SCORE  7 of 10\n")


def test_who_ends_is_told_what_it_was() -> None:
    done = run("breaks", "2", answers="end\n")
    assert done.stdout.endswith(f"It is: {FAULTS[breaks.NAMES[1]].mistake}\nSCORE  0 of 10\n")


@pytest.mark.parametrize("name", ["missing all-reduce forward", "stale KV head map", "replicas start differently"])
def test_tools_show_every_kind_of_fault(name: str) -> None:
    game = breaks.game_of(1 + breaks.NAMES.index(name))
    assert "DIFFERENT" in breaks.show_verify(game) and FAULTS[name].seen["y"] in breaks.show_table(game)
    losses = [float(line.split()[-1]) for line in breaks.show_losses(game).splitlines()]
    assert abs(losses[0] - losses[1]) > 1e-9 * losses[0]
    assert "right" in breaks.show_ledger(game) and breaks.show_types(game).startswith("they")
