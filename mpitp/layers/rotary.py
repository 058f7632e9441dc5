"""Rotary positions (Su et al. 2021) as a setting of attention: which angle each pair of columns turns by a position."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.backend.precision import wide_dtype
from mpitp.layers.rows import Rows
from mpitp.ops.rope import rope_inv_freq, rope_table
from mpitp.ops.rope_scaling import BY_LENGTH, amplitude, kind_of


class Rotary:
    """The turning of the first `width` columns of each head (all of them, or a part) with base `theta`.

    `scaling`: as in config.json, None: none; some kinds look at how long a text is up to its last row of the pass, on
    whatever rank that is. Two that are made alike are equal, so that a pass makes one table for both.
    """

    def __init__(self, width: int, theta: float, scaling: dict[str, Any] | None = None) -> None:
        self.width, self.theta, self.scaling = width, theta, scaling
        self.inv_freq = rope_inv_freq(width, theta, scaling)
        self._key = width, theta, repr(scaling)

    def table(self, rows: Rows, like: Array) -> tuple[Array, Array]:
        """cos and sin [t, width/2] of the rows' positions, on the device and in the (wide) dtype of `like`."""
        xp, dtype = array_module(like), wide_dtype(like.dtype)
        positions = from_host(rows.positions(), xp)
        cos, sin = rope_table(positions, self._frequencies(rows), dtype, xp)
        factor = amplitude(self.scaling)
        return (cos, sin) if factor == 1 else (cos * dtype.type(factor), sin * dtype.type(factor))

    def _frequencies(self, rows: Rows) -> np.ndarray:
        """Angles a position: [width/2] of all rows, or [t, width/2] where they depend on the length."""
        if kind_of(self.scaling) not in BY_LENGTH:
            return self.inv_freq
        ends = _ends(rows)
        of_length = {end: rope_inv_freq(self.width, self.theta, self.scaling, end) for end in {*ends.values()}}
        shape = self.width // 2
        return np.concatenate([np.broadcast_to(of_length[ends[run.slot]], (run.length, shape)) for run in rows.runs])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rotary) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _ends(rows: Rows) -> dict[int, int]:
    """Behind which position each text ends, by its slot; its rows may lie on several ranks."""
    ends: dict[int, int] = {}
    for run in chain(rows.runs, *rows.everyone):
        ends[run.slot] = max(ends.get(run.slot, 0), run.first + run.length)
    return ends
