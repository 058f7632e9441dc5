"""Which processes of this machine are a launcher's ranks: found by what the system tells, from their first moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpitp.comm.environment import launch_claim

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Descendants:
    """Of a launcher: the process of each rank, and the helpers that stand between (MPICH's hydra_pmi_proxy)."""

    ranks: dict[int, int]
    helpers: list[int]


def descendants(pid: int) -> Descendants:
    """What is below the launcher `pid` now. A rank's own children count for nothing."""
    children = _children()
    ranks: dict[int, int] = {}
    helpers: list[int] = []
    below = list(children.get(pid, ()))
    while below:
        child = below.pop()
        rank = _rank_of(child)
        if rank is None:
            helpers.append(child)
            below += children.get(child, ())
        else:
            ranks.setdefault(rank, child)
    return Descendants(ranks, [helper for helper in helpers if children.get(helper)])


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid, parent in _parents():
        found.setdefault(parent, []).append(pid)
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            yield int(folder.name), int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])


def _rank_of(pid: int) -> int | None:
    """The rank that a launcher has given to a process; None for one that is no rank."""
    try:
        lines = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or over
        return None
    claim = launch_claim(_pairs(lines))
    return claim.rank if claim.variable else None


def _pairs(lines: list[bytes]) -> dict[str, str]:
    texts = [line.decode(errors="replace") for line in lines if b"=" in line]
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
