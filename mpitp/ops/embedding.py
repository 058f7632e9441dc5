"""Row lookup in a table, of which this process may hold only the rows start .. start + n - 1.

    forward     y[i] = table[ids[i] - start], or zeros when that row isn't held
    backward    dtable[r] = sum over the tokens i with ids[i] = start + r of dy[i], in token order

The sum of all shards' forwards is the whole table's lookup.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitp.backend.arrays import array_module, from_host, to_host

Array = Any


def embedding_forward(ids: Array, table: Array, start: int = 0) -> Array:
    """y [t, h] of ids [t] and table [n, h], whose first row is that of id `start`; zeros for ids that aren't held."""
    xp = array_module(table)
    n, hidden = table.shape
    if n == 0:
        return xp.zeros((ids.shape[0], hidden), dtype=table.dtype)
    local = ids - start
    held = (local >= 0) & (local < n)
    y = table[xp.where(held, local, 0)]
    y *= held[:, None]
    return y


def embedding_backward(dy: Array, ids: Array, num_rows: int, start: int = 0) -> Array:
    """dtable [num_rows, h] of dy [t, h] and ids [t]. Each row's tokens are added in token order: same bits every time."""
    xp = array_module(dy)
    dtable = xp.zeros((num_rows, dy.shape[1]), dtype=dy.dtype)
    for tokens, rows in _rounds(to_host(ids).astype(np.int64) - start, num_rows):
        dtable[from_host(rows, xp)] += dy[from_host(tokens, xp)]
    return dtable


def _rounds(rows: np.ndarray, num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The held tokens in rounds, each with its rows: round r has the r-th token of every row, so no row comes twice."""
    tokens = np.flatnonzero((rows >= 0) & (rows < num_rows))
    tokens = tokens[np.argsort(rows[tokens], kind="stable")]  # row by row, each in token order
    sorted_rows = rows[tokens]
    first = np.flatnonzero(np.diff(sorted_rows, prepend=-1))  # where each row's tokens begin
    counts = np.diff(first, append=len(tokens))
    most = int(counts.max(initial=0))
    return [(tokens[first[counts > r] + r], sorted_rows[first[counts > r]]) for r in range(most)]
