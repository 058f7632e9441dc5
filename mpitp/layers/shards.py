"""Rows of a parameter that one rank of the data axes keeps for all of them (ZeRO: Rajbhandari et al. 2020).

    local array of a parameter [n, ...]; p ranks along the axes of data hold equal ones
    rank r keeps rows  piece_of(n, r, p)      sizes differ by at most one row; some ranks have none where n < p

A shard is a parameter of its own, with its own placement: optimizer, gradient norm and checkpoints treat it as any
other one, and the files of a run tell nothing of how its state was dealt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from mpitp.comm.group import Group
from mpitp.comm.mesh import Mesh
from mpitp.comm.serial import SerialGroup
from mpitp.layers.param import Param
from mpitp.layers.partition import split_evenly
from mpitp.layers.placement import Cut, Part, Placement
from mpitp.layers.site import DATA_AXES


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter with what each rank of `group` keeps of it: `rows` of every rank, and this rank's `piece`, whose
    data is a view of the parameter's.
    """

    name: str
    param: Param
    group: Group
    rows: tuple[range, ...]
    piece: Param


def make_shards(named_params: Iterable[tuple[str, Param]], mesh: Mesh) -> list[Shard]:
    """A shard of each parameter, over the axes of data along which it is replicated. A collective."""
    params = list(named_params)
    owners = ranks_along(mesh, DATA_AXES).all_reduce(
        np.array([param.placement.is_owner for _, param in params], np.int32)
    )
    return [_shard(name, param, mesh, bool(own)) for (name, param), own in zip(params, owners, strict=True)]


def data_axes(placement: Placement) -> tuple[str, ...]:
    """The axes along which equal copies of a parameter get gradients of different rows."""
    return tuple(axis for axis in DATA_AXES if axis in placement.partial)


def ranks_along(mesh: Mesh, axes: Iterable[str]) -> Group:
    """The ranks that differ from this one along these axes. One alone isn't watched: it has nothing to tell."""
    group = mesh.along(*axes)
    return group if group.size > 1 else SerialGroup()


def _shard(name: str, param: Param, mesh: Mesh, is_owner: bool) -> Shard:
    group = ranks_along(mesh, data_axes(param.placement))
    rows = split_evenly(len(param.data), group.size)
    mine = rows[group.rank]
    placement = narrowed(param.placement, mine, is_owner=is_owner)
    piece = replace(param, data=param.data[mine.start : mine.stop], placement=placement, grad=None)
    return Shard(name, param, group, rows, piece)


def narrowed(placement: Placement, rows: range, *, is_owner: bool) -> Placement:
    """The placement of `rows` (of the local array) alone. `is_owner`: whether the ranks that keep these rows together
    own what the parameter's placement calls owned. What the gradient is after backward doesn't change with it.
    """
    parts, start = [], 0
    for part in placement.parts:
        length = part.local_shape[0] if placement.fused == 0 else 0
        inner = range(max(rows.start, start) - start, min(rows.stop, start + length) - start) if length else rows
        first, *others = part.dims
        parts.append(Part(part.name, (_rows_of(first, inner), *others)))
        start += length
    return Placement(tuple(parts), placement.fused, placement.partial, is_owner)


def _rows_of(cut: Cut, rows: range) -> Cut:
    """Rows of what is held (counted from its first)."""
    held = cut.held[rows.start : rows.stop] if len(rows) else cut.held[:0]
    blocks = tuple(inner for block in cut.blocks if len(inner := _overlap(block, held)))
    return Cut(cut.size, held, _overlap(cut.owned, held), blocks, cut.axis)


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
