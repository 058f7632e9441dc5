"""Walking by keys, without a terminal."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.step.picture import picture_of, tiles
from mpitp.step.questions import question_about
from mpitp.step.screen import list_lines, whole_op
from mpitp.step.values import panels
from mpitp.step.walk import Walk
from tests.step.films import film_of


def walk(keys: str = "", **options: object) -> Walk:
    made = Walk(film_of(), **options)
    for key in keys:
        made.press(key)
    return made


def test_steps_forward_and_back() -> None:
    last = len(film_of().ops)
    assert walk("nnn").number == 4
    assert walk("nnp").number == 2
    assert walk("p").message == "this is the first operation"
    end = walk(number=last)
    end.press("n")
    assert (end.number, end.message) == (last, "this was the last operation")
    assert "no such key" in walk("z").message
    assert walk("q").is_over


def test_collectives_and_conjugates() -> None:
    at = walk("xx")
    assert (at.op.layer, at.op.collective) == ("blocks.0.attention.out", "all_reduce sum")
    at.press("j")
    assert (at.op.layer, at.op.phase) == ("blocks.0.attention.out", "backward")
    at.press("j")
    assert at.op.collective
    at.press("X")
    assert at.op.layer == "embedding"
    at.press("X")
    assert at.message == "no earlier collectives"
    assert walk("nnj").message.startswith("nothing in the other pass")


def test_breakpoints() -> None:
    at = walk("c")
    assert "no breakpoint is set" in at.message
    at.press("b")
    at.answer("gate_up")
    at.press("c")
    assert at.op.layer == "blocks.0.mlp.gate_up" and at.op.phase == "forward"
    at.press("c")
    assert at.op.layer == "blocks.0.mlp.gate_up" and at.op.phase == "backward"
    at.press("C")
    assert at.op.phase == "forward"
    at.press("b")
    at.answer("no such layer")
    assert at.breakpoints == ["gate_up"] and "no layer" in at.message
    at.press("b")
    at.answer("collectives")
    at.press("b")
    at.answer("gate_up")
    assert at.breakpoints == ["collectives"]
    at.press("c")
    assert at.op.collective


def test_going_to_a_number() -> None:
    at = walk("g")
    at.answer("12")
    assert at.number == 12
    at.press("g")
    at.answer("1000")
    assert at.number == 12 and "not a number from 1" in at.message


def test_predict_asks_and_keeps_score() -> None:
    at = walk("t")
    film = at.film
    for number in range(2, len(film.ops) + 1):
        at.press("n")
        question = at.question
        assert question is not None and at.number == number - 1, "nothing is shown before the answer"
        wrong = {"y": "n", "n": "y", "r": "s", "s": "p", "p": "r"}.get(question.right, "99")
        at.answer(question.right if number % 4 else wrong)
        assert at.number == number
        assert at.message.startswith("right" if number % 4 else "not quite")
    asked = len(film.ops) - 1
    assert (at.asked, at.right) == (asked, asked - len(film.ops) // 4)
    assert f"score {at.right}/{at.asked}" in at.lines(80, 24)[0]


def test_questions_cover_shape_placement_and_communication() -> None:
    film = film_of()
    questions = [question_about(op) for op in film.ops]
    assert {question.right for question in questions} >= {"r", "s", "p", "y", "n"}
    for op, question in zip(film.ops, questions, strict=True):
        assert question.is_right(f" {question.right.upper()} ") and not question.is_right("?")
        if op.collective:
            assert question.right == "y"
            assert op.collective not in question.text, "the question gives nothing away"


@pytest.mark.parametrize(("preset", "ranks"), [("llama", 1), ("llama", 3), ("gpt2", 2), ("gpt2", 7), ("qwen2", 4)])
def test_every_screen_fits(preset: str, ranks: int) -> None:
    film = film_of(preset, ranks)
    for size in ((80, 24), (132, 43)):
        at = Walk(film)
        for number in range(1, len(film.ops) + 1):
            at.number = number
            for key in "aravt":
                at.press(key)
                lines = at.lines(*size)
                assert len(lines) <= size[1] and max(map(len, lines)) <= size[0]
                text = "\n".join(lines)
                assert at.op.layer in text and "q quit" in text and "held a rank" in text
        for key in "l?":
            at.press(key)
            lines = at.lines(*size)
            assert len(lines) <= size[1] and max(map(len, lines)) <= size[0]
            at.press("n")


def test_small_arrays_are_shown_whole() -> None:
    at = walk("xx")
    lines = at.lines(80, 24)
    start = next(i for i, line in enumerate(lines) if line.startswith("rank 0"))
    shown = [[float(word) for word in line.split()] for line in lines[start + 1 : start + 5]]
    expected = np.concatenate([np.array(picture.values) for picture in at.op.arrays[0].pictures], axis=1)
    np.testing.assert_allclose(shown, expected, atol=0.006)
    assert "+ rank 1 [4, 4]" in lines[start] and lines[start + 5] == "= y, on every rank [4, 4]"
    total = [[float(word) for word in line.split()] for line in lines[start + 6 : start + 10]]
    np.testing.assert_allclose(total, at.op.made.pictures[0].values, atol=0.006)


def test_listing_and_whole_operations() -> None:
    film = film_of()
    text = "\n".join(list_lines(film))
    assert all(op.layer in text for op in film.ops)
    whole = whole_op(film, film.op(4))
    assert max(map(len, whole)) <= 80
    assert sum(line.startswith("y, rank") for line in whole) == 3, "too wide side by side: one below the other"


def test_tiles_of_large_arrays() -> None:
    x = np.arange(100 * 200, dtype=np.float32).reshape(100, 200)
    picture = picture_of(x)
    assert not picture.is_whole and len(picture.values) <= 24 and len(picture.values[0]) <= 36
    np.testing.assert_allclose(tiles(np.ones((7, 5)), 3, 2), np.ones((3, 2)))
    np.testing.assert_allclose(tiles(np.array([[3.0, 4.0]]), 1, 1), [[np.sqrt(12.5)]])
    lines = panels([picture, picture], ["rank 0", "rank 1"], 80, 10, shades=False)
    assert len(lines) <= 10 and "root mean squares" in lines[-1]


def test_more_ranks_than_fit_side_by_side() -> None:
    pictures = [picture_of(np.full((4, 3), rank, np.float32)) for rank in range(100)]
    lines = panels(pictures, [f"rank {rank}" for rank in range(100)], 80, 10, shades=False)
    assert lines[0].split()[-2:] == ["rank", "8"] and lines[-1] == "... and 91 more (r: one rank at a time)"
    assert len(lines) <= 10 and max(map(len, lines)) <= 80


def test_zero_has_no_sign() -> None:
    lines = panels([picture_of(np.array([[-0.0, -1.0]], np.float32))], ["rank 0"], 80, 10, shades=False)
    assert lines[1].split() == ["0.00", "-1.00"]


SIZES = [(80, 24), (79, 24), (80, 23), (60, 20), (40, 12), (200, 12), (40, 60), (39, 24), (80, 11), (20, 5), (1, 1)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_screen_fits_the_terminal_and_keeps_its_title(width: int, height: int) -> None:
    made = walk()
    for keys in ("", "?", "l", "t", "n"):
        for key in keys:
            made.press(key)
        for number in (1, len(made.film.ops) // 2, len(made.film.ops)):
            made.number = number
            lines = made.lines(width, height)
            assert len(lines) <= height and max(map(len, lines)) <= width
            if made.page is None:
                assert lines[0].startswith("mpitp step"[:width])
            if made.page is None and made.question is None and min(width - 40, height - 12) >= 0:
                assert lines[1].startswith(f"{number}/{len(made.film.ops)} ")
        if keys in ("?", "l"):
            made.press("x")


def test_small_terminals_are_told_what_is_needed() -> None:
    made = walk()
    assert made.lines(80, 24)[-1] == ""
    assert made.lines(79, 24)[-1] == made.lines(80, 23)[-1] == "a terminal of 80 by 24 shows all of it"
    said = " ".join(" ".join(made.lines(39, 11)).split())
    assert said.startswith("mpitp step needs 40 columns and 12 lines at least; this terminal has 39 and 11.")
    made.press("b")
    assert made.lines(60, 20)[-1].startswith("breakpoint at")


def test_pages_turn_by_what_was_shown() -> None:
    made = walk()
    made.press("l")
    seen = made.lines(80, 14)[:12]
    made.press(" ")
    assert made.lines(80, 14)[:12] == made.page[12:24] and seen == made.page[:12]  # type: ignore[index]


def test_lines_of_code_and_examples_in_place() -> None:
    at = walk("w")
    page = "\n".join(at.page or [])
    assert "mpitp/layers/embedding.py, line " in page and "key e shows their lines" in page
    at.press("b")
    at.press("e")
    assert at.page is not None and at.page[0].startswith("05  ")
    assert at.page[1] == "python examples/05_the_vocabulary.py"
    assert "def main(group: Group) -> None:" in at.page


def test_a_large_terminal_shows_all_arrays_in_the_order_of_the_equation() -> None:
    at = walk()
    large = at.lines(120, 40)
    assert "    tokens: 'hill' 'to' 'ran' 'cat'" in large
    heads = [line.split(",")[0] for line in large if ", rank 0 [" in line]
    assert heads == ["ids", "E", "y_partial"]
    assert [line for line in at.lines(80, 24) if ", rank 0 [" in line] == []
    at.press("g")
    at.answer("6")
    lines = at.lines(120, 40)
    assert [line.split(",")[0] for line in lines if ", rank 0 [" in line] == ["x", "W", "y_partial"]
    at.press("a")
    assert [line for line in at.lines(120, 40) if ", rank 0 [" in line] == [], "one array, and it alone"


def test_scores_of_two_heads_stand_apart() -> None:
    at = walk("g")
    at.answer("5")
    at.press("a")
    at.press("a")
    lines = at.lines(120, 40)
    first = next(i for i, line in enumerate(lines) if line.startswith("rank 0 [2, 4, 4]"))
    assert [bool(line.strip()) for line in lines[first + 1 : first + 10]] == [True] * 4 + [False] + [True] * 4
