"""Cross entropy over a vocabulary of which this process holds the columns start .. start + v - 1 of the logits.

    loss_i = log(denominator_i) + max_i - logits[i, target_i],  denominator_i = sum over the vocabulary of exp(logits -
    max) dlogits = (e / denominator - onehot(target)) * weight,      e = exp(logits - max)

Max, denominator and target logit are each one small reduction over the ranks; the logits never leave their rank. What
is here is the part before and after those reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.ops.row_blocks import paired_blocks, without_gaps


def cross_entropy_reference(logits: Array, targets: Array) -> Array:
    """The plain loss of every row [t] over a whole vocabulary."""
    xp = array_module(logits)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return xp.log(xp.exp(shifted).sum(axis=1)) - shifted[xp.arange(logits.shape[0]), targets]


def row_max(logits: Array) -> Array:
    """Largest logit of every row [t]; -inf when there are no columns."""
    if logits.size == 0:
        return array_module(logits).full((logits.shape[0],), -float("inf"), dtype=logits.dtype)
    return logits.max(axis=1)


def exp_sums(logits: Array, row_max: Array, blocks: Sequence[range]) -> tuple[Array, Array]:
    """e [t, v] = exp(logits - row_max), and its sums over each block of columns [len(blocks), t]; both wide."""
    xp = array_module(logits)
    wide = wide_dtype(logits.dtype)
    e = xp.empty(logits.shape, dtype=wide)
    sums = xp.empty((len(blocks), logits.shape[0]), dtype=wide)
    if is_accelerated(xp, logits.dtype):
        from mpitp.ops.compiled import cross_entropy as compiled

        bounds = np.array([(block.start, block.stop) for block in blocks], np.int64).reshape(-1, 2)
        compiled.exp_sums(without_gaps(logits), row_max, bounds, e, sums)
        return e, sums
    for logits_rows, max_rows, e_rows, sums_rows in paired_blocks(xp, logits, row_max[:, None], e, sums.T):
        xp.subtract(logits_rows, max_rows, out=e_rows, dtype=wide)
        xp.exp(e_rows, out=e_rows)
        for i, block in enumerate(blocks):
            sums_rows[:, i] = e_rows[:, block.start : block.stop].sum(axis=1)
    return e, sums


def target_logits(logits: Array, targets: Array, start: int) -> Array:
    """logits[i, targets[i] - start] [t]; 0 where the target isn't held here or is negative (ignored)."""
    xp = array_module(logits)
    (rows, cols), wide = logits.shape, wide_dtype(logits.dtype)
    if cols == 0:
        return xp.zeros((rows,), dtype=wide)
    local, held = _local_targets(xp, targets, start, cols)
    return xp.where(held, logits[xp.arange(rows), local].astype(wide, copy=False), xp.zeros((), dtype=wide))


def cross_entropy_backward(e: Array, targets: Array, start: int, denominators: Array, weights: Array) -> Array:
    """dlogits [t, v] of e [t, v], targets [t], denominators [t] over the whole vocabulary, and weights [t]."""
    xp = array_module(e)
    rows, cols = e.shape
    dlogits = e * (weights / denominators)[:, None]
    if cols:
        local, held = _local_targets(xp, targets, start, cols)
        dlogits[xp.arange(rows), local] -= xp.where(held, weights, xp.zeros((), dtype=weights.dtype))
    return dlogits


def _local_targets(xp: Any, targets: Array, start: int, cols: int) -> tuple[Array, Array]:
    """Column of each target here (0 where it isn't held), and whether it is held."""
    local = targets - start
    held = (targets >= 0) & (local >= 0) & (local < cols)
    return xp.where(held, local, 0), held
