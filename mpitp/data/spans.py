"""How well labels of words were told: the F1 of the spans that they make, or of the labels themselves.

    precision = right / found,  recall = right / wanted,  F1 = 2 right / (found + wanted)     (micro: over all classes)

Labels like O, B-PER, I-PER (also E- and S-) mark spans: one counts as right where both its ends and its kind are. A
span begins at B or S, and at I or E behind another kind or none, as in conlleval (Tjong Kim Sang & Buchholz 2000).
Other labels count one by one, O (nothing) apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_MARK = re.compile(r"O|[BIES](-.+)?")
OUTSIDE = "O"


class Counts(NamedTuple):
    """What is to be added up over sentences."""

    right: int
    found: int
    wanted: int


def marks_spans(labels: Sequence[str]) -> bool:
    """Whether labels are of the kind that marks spans."""
    return any(label != OUTSIDE for label in labels) and all(_MARK.fullmatch(label) for label in labels)


def counts_of(wanted: Sequence[str], found: Sequence[str], *, as_spans: bool) -> Counts:
    """Of one sentence's labels, a word each."""
    if as_spans:
        both = [set(spans_of(labels)) for labels in (wanted, found)]
        return Counts(len(both[0] & both[1]), len(both[1]), len(both[0]))
    right = sum(a == b != OUTSIDE for a, b in zip(wanted, found, strict=True))
    return Counts(right, *(sum(label != OUTSIDE for label in labels) for labels in (found, wanted)))


def f1_of(right: float, found: float, wanted: float) -> float:
    """F1; 0 where there is nothing to find and nothing was found."""
    return 2 * right / (found + wanted) if found + wanted else 0.0


def spans_of(labels: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first word, end, kind) of each span.

    >>> spans_of(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC')]
    """
    spans: list[tuple[int, int, str]] = []
    start, kind = 0, None
    for place, label in enumerate([*labels, OUTSIDE]):
        mark, _, name = label.partition("-")
        begins = mark in "BS" or (mark in "IE" and name != kind)
        if kind is not None and (mark == OUTSIDE or begins):
            spans.append((start, place, kind))
            kind = None
        if mark != OUTSIDE and begins:
            start, kind = place, name
        if mark in "ES" and kind is not None:
            spans.append((start, place + 1, kind))
            kind = None
    return spans
