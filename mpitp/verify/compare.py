"""Puts the ranks' records together on rank 0 and compares them with the one-rank oracle's.

Every record says what its type claims: pieces of the global array, the whole, or a summand. Rank 0 writes each rank's
pieces into one array; elements that come a second time (replicas) must be equal to the bit to the ones already there,
and summands are added. The assembled array is then compared with the oracle's. Only one array is under way at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.verify.axis import Places, axis_at_fault
from mpitp.verify.record import Record
from mpitp.verify.whole import Held, Whole, assemble, difference, magnitude

Key = tuple[str, str]  # name, kind


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the report. `replicas`: largest difference between ranks that claim the same elements."""

    name: str
    kind: str
    shape: tuple[int, ...]
    largest_abs: float
    largest_rel: float  # relative to the largest magnitude in the oracle's array
    replicas: float
    ok: bool
    axis: str = ""  # of the mesh, along which it went wrong, and how; "": equal, or not to be told

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What counts as equal: differences up to `relative` times the largest magnitude in the oracle's array.

    An array that is zero but for rounding has no scale of its own; its magnitude counts as at least `floor` times the
    largest one among all arrays of its kind. Weights at the start and replicas must be equal to the bit.

    `update`: the same as `relative` for changes of weights, which begin with the rounding of the weights themselves.
    """

    relative: float
    update: float
    floor: float = 0.0

    def of(self, kind: str) -> float:
        """The tolerance for rows of this kind."""
        return {"start": 0.0, "update": self.update}.get(kind, self.relative)


EXACT = Tolerance(0.0, 0.0)
ROUGHLY = 1e-5  # of the largest magnitude: whether what is wrong is a sum, or a multiple, of what it should be


def compare(
    group: Group, own: Sequence[Record], oracle: Sequence[Record] | None, tolerance: Tolerance, at: Places = ()
) -> list[Comparison]:
    """The rows of the report on rank 0 (others: none). A collective; `oracle` is rank 0's alone.

    `at`: every rank's place along each axis, to name the one at fault.
    """
    mine, theirs = _by_key(own), _by_key(oracle or ())
    order = group.broadcast_object(list(theirs))
    everyones = group.all_gather_objects({key: [_Place.of(each) for each in found] for key, found in mine.items()})
    if any(key not in order for places in everyones for key in places):
        raise RuntimeError("a rank has recorded what the one-rank model doesn't have; this is a bug")
    references = {key: assemble([(0, each) for each in found]) for key, found in theirs.items()}
    floors = {kind: tolerance.floor * largest for kind, largest in _largest_of_kinds(references).items()}
    rows = []
    for key in order:
        if group.rank == 0:
            held = [(0, record) for record in mine.get(key, ())]
            held += [(r, place.received(group, r)) for r in range(1, group.size) for place in everyones[r].get(key, ())]
            rows.append(_row(key, references[key], held, floors[key[1]], tolerance.of(key[1]), at))
        else:
            for record in mine.get(key, ()):
                group.send(record.array, 0)
    return rows


def _by_key(records: Sequence[Record]) -> dict[Key, list[Record]]:
    """The records of each array: one for each microbatch."""
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault((record.name, record.kind), []).append(record)
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """A record without its values, and their shape: what rank 0 needs to know to be sent them."""

    record: Record
    shape: tuple[int, ...]

    @classmethod
    def of(cls, record: Record) -> _Place:
        return cls(replace(record, array=np.empty(0, record.array.dtype)), record.array.shape)

    def received(self, group: Group, rank: int) -> Record:
        """The record with its values, from their rank."""
        return replace(self.record, array=group.recv(np.empty(self.shape, self.record.array.dtype), rank))


def _largest_of_kinds(references: Mapping[Key, Whole]) -> dict[str, float]:
    """The largest magnitude among the arrays of each kind."""
    largest: dict[str, float] = {}
    for (_, kind), whole in references.items():
        largest[kind] = max(largest.get(kind, 0.0), magnitude(whole.array))
    return largest


def _row(key: Key, reference: Whole, held: Sequence[Held], floor: float, tolerance: float, at: Places) -> Comparison:
    whole = assemble(held, reference.array.shape)
    absolute = difference(reference.array, whole.array) if whole.is_full else float("inf")
    scale = max(magnitude(reference.array), floor)
    relative = absolute / scale if scale else absolute
    is_equal = relative <= tolerance and whole.replicas == 0
    axis = "" if is_equal else axis_at_fault(reference.array, held, at, (tolerance * scale, ROUGHLY * scale))
    return Comparison(*key, reference.array.shape, absolute, relative, whole.replicas, is_equal, axis)
