"""The passes over one tile of attention's scores, between its matrix products.

Row i of a tile sees its columns from `unseen + i` up to, but not including, `seen + i`; what lies before or behind them
is set to 0 and not computed.
"""

from __future__ import annotations

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.exp import exp_flushed
from mpitp.ops.compiled.primitives import row
from mpitp.ops.compiled.rows import row_maximum, row_sum


@compiled()
def softmax_numerators(scores: Array, unseen: int, seen: int, scale: float, row_max: Array, total: Array) -> None:
    """Products q k^T [r, c] become e = exp(scale * (score - m)), with m their row's maximum.

    scale * m and the row's sum of e go to [r, 1].
    """
    rows, cols = scores.shape
    factor = scores.dtype.type(scale)
    for i in range(rows):
        whole = row(scores, i)
        first, stop = max(unseen + i, 0), min(seen + i, cols)
        visible = whole[first:stop]
        largest = factor * row_maximum(visible)
        for j in range(visible.shape[0]):
            visible[j] = exp_flushed(factor * visible[j] - largest)
        row_max[i, 0], total[i, 0] = largest, row_sum(visible)
        for j in range(first):
            whole[j] = 0.0
        for j in range(stop, cols):
            whole[j] = 0.0


@compiled()
def softmax_backward(
    scores: Array, dp: Array, unseen: int, seen: int, scale: float, lse: Array, row_dots: Array
) -> None:
    """Products q k^T [r, c] become p = exp(scale * score - lse), and dp [r, c] becomes scale * p * (dp - D).

    lse and D are [r].
    """
    rows, cols = scores.shape
    factor = scores.dtype.type(scale)
    for i in range(rows):
        whole_p, whole_ds = row(scores, i), row(dp, i)
        first, stop = max(unseen + i, 0), min(seen + i, cols)
        p, ds = whole_p[first:stop], whole_ds[first:stop]
        shift, dot = lse[i], row_dots[i]
        for j in range(p.shape[0]):
            p[j] = exp_flushed(factor * p[j] - shift)
            ds[j] = factor * p[j] * (ds[j] - dot)
        for j in range(first):
            whole_p[j] = 0.0
            whole_ds[j] = 0.0
        for j in range(stop, cols):
            whole_p[j] = 0.0
            whole_ds[j] = 0.0
