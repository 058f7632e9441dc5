"""Which send came in which receive: the arrows between the rows of a timeline.

A message is known by its group, its ends, its tag, and how many such came before: messages of one tag keep their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.trace.tracer import Traffic

Key = tuple[str, int, int, str, int]  # group, sender and receiver by their numbers in the job, tag, how many before


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message from the moment at which its send began until its receive had ended, between two ranks' rows."""

    source: int
    dest: int
    sent: Traffic
    received: Traffic


def arrows(traffic: Sequence[Sequence[Traffic]]) -> list[Arrow]:
    """Every message of which both ends were seen."""
    sent: dict[Key, tuple[int, Traffic]] = {}
    received: dict[Key, tuple[int, Traffic]] = {}
    for rank, entries in enumerate(traffic):
        counts: Counter[tuple[str, int, int, str]] = Counter()
        for entry in (entry for entry in entries if entry.op in ("send", "recv")):
            way, peer, tag = _words(entry)
            other = entry.members[peer] if entry.members else peer
            ends = (rank, other) if way == "to" else (other, rank)
            message = entry.group, *ends, tag
            ends_of = sent if way == "to" else received
            ends_of[(*message, counts[message])] = rank, entry
            counts[message] += 1
    return [
        Arrow(rank, received[key][0], entry, received[key][1]) for key, (rank, entry) in sent.items() if key in received
    ]


def _words(entry: Traffic) -> tuple[str, int, str]:
    """Way, peer and tag of a detail such as "to 1 tag 5"."""
    way, peer, *tag = entry.detail.split()
    return way, int(peer), " ".join(tag)
