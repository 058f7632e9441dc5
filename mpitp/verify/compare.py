"""Puts the ranks' records together on rank 0 and compares them with the one-rank oracle's.

Every record says which rows of the global array it holds. Rank 0 writes each rank's rows into one array; rows that come
a second time (replicas) must be equal to the bit to the ones already there. The assembled array is then compared with
the oracle's. Only one array is under way at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.trace.stand_in import Parts
from mpitp.verify.record import Record


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `replicas`: largest difference between ranks that claim the same elements."""

    name: str
    kind: str
    shape: tuple[int, ...]
    largest_abs: float
    largest_rel: float  # relative to the largest magnitude in the oracle's array
    replicas: float
    ok: bool

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


def compare(group: Group, own: Sequence[Record], oracle: Sequence[Record] | None, tolerance: Tolerance) -> list[Row]:
    """The rows of the report on rank 0 (others: none). A collective; `oracle` is rank 0's alone."""
    placements = group.all_gather_objects([_placement(record) for record in own])
    names = [[(name, kind) for name, kind, *_ in rank] for rank in placements]
    if any(other != names[0] for other in names[1:]):
        raise RuntimeError("the ranks recorded different layers; this is a bug")
    floors = {kind: tolerance.floor * largest for kind, largest in _largest_of_kinds(oracle or ()).items()}
    rows = []
    for index, record in enumerate(own):
        if group.rank != 0:
            group.send(record.array, 0)
            continue
        assert oracle is not None
        reference = oracle[index]
        assert (reference.name, reference.kind) == (record.name, record.kind), "oracle and layout record alike"
        pieces = [record.array]
        for rank in range(1, group.size):
            pieces.append(group.recv(np.empty(placements[rank][index][2], record.array.dtype), rank))
        whole, replicas = _assemble(reference.array, pieces, [rank[index] for rank in placements])
        rows.append(_row(reference, whole, replicas, floors[record.kind], tolerance.of(record.kind)))
    return rows


Placement = tuple[str, str, tuple[int, ...], Parts | None, int]


def _placement(record: Record) -> Placement:
    return record.name, record.kind, record.array.shape, record.parts, record.dim


def _largest_of_kinds(records: Sequence[Record]) -> dict[str, float]:
    """The largest magnitude among the arrays of each kind."""
    largest: dict[str, float] = {}
    for record in records:
        largest[record.kind] = max(largest.get(record.kind, 0.0), _magnitude(record.array))
    return largest


def _assemble(
    reference: np.ndarray, pieces: Sequence[np.ndarray], placements: Sequence[Placement]
) -> tuple[np.ndarray | None, float]:
    """The global array (None: elements are missing) and the largest difference between replicas."""
    whole = np.zeros_like(reference)
    _, _, _, parts, dim = placements[0]
    filled = np.zeros(reference.shape[dim] if parts is not None else 1, bool)
    replicas = 0.0
    for piece, (_, _, _, parts, dim) in zip(pieces, placements, strict=True):
        if parts is None:
            replicas = max(replicas, _difference(whole, piece)) if filled[0] else replicas
            whole, filled[0] = (whole if filled[0] else piece), True
        else:
            replicas = max(replicas, _place(whole, filled, piece, parts, dim))
    return whole if filled.all() else None, replicas


def _row(reference: Record, whole: np.ndarray | None, replicas: float, floor: float, tolerance: float) -> Row:
    absolute = float("inf") if whole is None else _difference(reference.array, whole)
    scale = max(_magnitude(reference.array), floor)
    relative = absolute / scale if scale else absolute
    is_equal = relative <= tolerance and replicas == 0
    return Row(reference.name, reference.kind, reference.array.shape, absolute, relative, replicas, is_equal)


def _place(whole: np.ndarray, filled: np.ndarray, piece: np.ndarray, parts: Parts, dim: int) -> float:
    """Write a rank's rows into the whole; the largest difference to rows that were there already."""
    whole, piece = np.moveaxis(whole, dim, 0), np.moveaxis(piece, dim, 0)
    replicas, local, base = 0.0, 0, 0
    for part in parts:
        rows = slice(base + part.held.start, base + part.held.stop)
        values = piece[local : local + len(part.held)]
        seen = filled[rows]
        replicas = max(replicas, _difference(whole[rows][seen], values[seen]))
        whole[rows][~seen] = values[~seen]
        filled[rows] = True
        local, base = local + len(part.held), base + part.size
    return replicas


def _magnitude(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference; infinite where one is not finite and the other isn't the same."""
    if a.shape != b.shape:
        return float("inf")
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b).max(initial=0.0)
    return float(difference) if np.isfinite(difference) else float("inf")
