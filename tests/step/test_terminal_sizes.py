"""Every operation in a real terminal of 80 by 24 and of 120 by 40, with a change of size on the way."""

from __future__ import annotations

import re

import pytest

from tests.step.test_terminal import CLEAR, Session, nothing_is_left_running

__all__ = ["nothing_is_left_running"]  # a fixture

COLOURS = re.compile(r"\x1b\[\d*m")


def screens_of(session: Session) -> list[list[str]]:
    """All screens so far, as lines without colours and line ends."""
    texts = COLOURS.sub("", session.text).split(CLEAR)[1:]
    return [[line.rstrip("\r") for line in text.split("\n")] for text in texts]


@pytest.mark.parametrize(("rows", "columns", "other"), [(24, 80, (40, 120)), (40, 120, (24, 80))])
def test_every_operation_fits_and_a_change_of_size_is_followed(rows: int, columns: int, other: tuple[int, int]) -> None:
    session = Session("--preset", "gpt2")
    session.resize(rows, columns)
    session.wait_for("1/64 forward")
    session.send("n" * 31)
    session.wait_for("32/64")
    before = screens_of(session)
    session.resize(*other)
    session.wait_for("32/64")
    session.text = ""
    session.send("n" * 32 + "wqlq?q")
    session.wait_for("64/64")
    assert [lines[1].split("/")[0] for lines in before if "/64 " in lines[1]][-31:] == [str(k) for k in range(2, 33)]
    for (height, width), screens in (((rows, columns), before[-31:]), (other, screens_of(session))):
        assert len(screens) > 30
        for lines in screens:
            assert len(lines) <= height and max(map(len, lines)) <= width, "\n".join(lines)
    session.send("q")
    assert session.end() == 0
    assert "Traceback" not in session.text
