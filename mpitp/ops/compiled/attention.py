"""The passes over one tile of attention's scores, between its matrix products.

Row i of a tile sees its first `seen + i` columns; what lies after them is set to 0 and not computed.
"""

from __future__ import annotations

from typing import Any

from mpitp.backend.accelerator import compiled
from mpitp.ops.compiled.exp import exp_flushed
from mpitp.ops.compiled.primitives import row
from mpitp.ops.compiled.rows import row_maximum, row_sum

Array = Any


@compiled()
def softmax_numerators(scores: Array, seen: int, scale: float, row_max: Array, total: Array) -> None:
    """Products q k^T [r, c] become e = exp(scale * (score - m)), with m their row's maximum.

    scale * m and the row's sum of e go to [r, 1].
    """
    rows, cols = scores.shape
    factor = scores.dtype.type(scale)
    for i in range(rows):
        whole = row(scores, i)
        visible = whole[: min(seen + i, cols)]
        largest = factor * row_maximum(visible)
        for j in range(visible.shape[0]):
            visible[j] = exp_flushed(factor * visible[j] - largest)
        row_max[i, 0], total[i, 0] = largest, row_sum(visible)
        for j in range(visible.shape[0], cols):
            whole[j] = 0.0


@compiled()
def softmax_backward(scores: Array, dp: Array, seen: int, scale: float, lse: Array, row_dots: Array) -> None:
    """Products q k^T [r, c] become p = exp(scale * score - lse), and dp [r, c] becomes scale * p * (dp - D).

    lse and D are [r].
    """
    rows, cols = scores.shape
    factor = scores.dtype.type(scale)
    for i in range(rows):
        p, ds = row(scores, i), row(dp, i)
        visible = min(seen + i, cols)
        shift, dot = lse[i], row_dots[i]
        for j in range(visible):
            p[j] = exp_flushed(factor * p[j] - shift)
            ds[j] = factor * p[j] * (ds[j] - dot)
        for j in range(visible, cols):
            p[j] = 0.0
            ds[j] = 0.0
