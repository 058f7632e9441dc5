"""Row lookup in a table, of which this process may hold only the rows start .. start + n - 1.

    forward     y[i] = table[ids[i] - start], or zeros when that row isn't held
    backward    dtable[r] = sum over the tokens i with ids[i] = start + r of dy[i], in token order

The sum of all shards' forwards is the whole table's lookup.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host, to_host
from mpitp.backend.precision import wide_dtype


def embedding_forward(ids: Array, table: Array, start: int = 0) -> Array:
    """y [t, h] of ids [t] and table [n, h], whose first row is that of id `start`; zeros for ids that aren't held."""
    xp = array_module(table)
    n, hidden = table.shape
    if n == 0:
        return xp.zeros((ids.shape[0], hidden), dtype=table.dtype)
    local = ids.astype(np.int64) - start  # signed: ids below `start` become negative
    held = (local >= 0) & (local < n)
    y = table[xp.where(held, local, 0)]
    y *= held[:, None]
    return y


def embedding_backward(dy: Array, ids: Array, num_rows: int, start: int = 0) -> Array:
    """dtable [num_rows, h] of dy [t, h] and ids [t]; each row adds its tokens in token order, always alike."""
    xp = array_module(dy)
    dtable = xp.zeros((num_rows, dy.shape[1]), dtype=wide_dtype(dy.dtype))
    rows = to_host(ids).astype(np.int64) - start
    tokens = np.flatnonzero((rows >= 0) & (rows < num_rows))
    if xp is np:
        # row after row: three times as fast as np.add.at
        for token, row in zip(tokens.tolist(), rows[tokens].tolist(), strict=True):
            dtable[row] += dy[token]
        return dtable
    for some in _rounds(tokens, rows):
        dtable[from_host(rows[some], xp)] += dy[from_host(some, xp)]
    return dtable


def _rounds(tokens: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """The tokens in rounds: round r has the r-th token of every row, so that no row comes twice in one.

    Additions through an index array with repeats would get lost, and atomic ones come in any order.
    """
    tokens = tokens[np.argsort(rows[tokens], kind="stable")]  # row by row, each in token order
    first = np.flatnonzero(np.diff(rows[tokens], prepend=-1))  # where each row's tokens begin
    counts = np.diff(first, append=len(tokens))
    for r in range(int(counts.max(initial=0))):
        yield tokens[first[counts > r] + r]
