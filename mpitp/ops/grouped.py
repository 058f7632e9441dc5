"""Products of neighbouring rows with a matrix of their own each: rows sorted by expert, w [e, n, k].

    forward     y_i  = x_i @ w_i.T        x_i [counts_i, k]: the rows of expert i, counts may be 0
    backward    dx_i = dy_i @ w_i         dw_i = dy_i.T @ x_i

One product an expert, in a loop: as many rows as an expert has, none for padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.ops.groupwise import Grouping, Multiply, groupwise_forward, groupwise_input_grad
from mpitp.ops.linear import linear_forward, linear_input_grad, linear_weight_grad


def grouped_forward(x: Array, w: Array, counts: np.ndarray) -> Array:
    """y [t, n] of x [t, k]; t is the sum of `counts`."""
    y = array_module(x).empty((len(x), w.shape[1]), x.dtype)
    for i, rows in _groups(counts):
        linear_forward(x[rows], w[i], out=y[rows])
    return y


def grouped_input_grad(dy: Array, w: Array, counts: np.ndarray) -> Array:
    """dx [t, k] of dy [t, n]."""
    dx = array_module(dy).empty((len(dy), w.shape[2]), dy.dtype)
    for i, rows in _groups(counts):
        linear_input_grad(dy[rows], w[i], out=dx[rows])
    return dx


def grouped_weight_grad(dys: Sequence[Array], xs: Sequence[Array], counts: Sequence[np.ndarray], dtype: Any) -> Array:
    """dw [e, n, k] of dy [t, n] and x [t, k], in `dtype`; noughts of experts without rows. The experts come in several
    pieces, each with rows of its own: those of the first piece, then those of the next.
    """
    shape = (sum(map(len, counts)), dys[0].shape[1], xs[0].shape[1])
    dw, first = array_module(xs[0]).zeros(shape, dtype), 0
    for dy, x, piece in zip(dys, xs, counts, strict=True):
        for i, rows in _groups(piece):
            linear_weight_grad(dy[rows], x[rows], out=dw[first + i])
        first += len(piece)
    return dw


def groupwise_grouped_forward(
    x: Array,
    codes: Array,
    scales: Array,
    grouping: Grouping,
    counts: np.ndarray,
    multiply: Multiply = groupwise_forward,
) -> Array:
    """As `grouped_forward`, of w in 8 or 4 bits: codes [e, n, k * bits / 8], scales [e, n, k/g] (twice as
    wide with least values), by `multiply`.
    """
    y = array_module(x).empty((len(x), scales.shape[1]), x.dtype)
    for i, rows in _groups(counts):
        multiply(x[rows], codes[i], scales[i], grouping, out=y[rows])
    return y


def groupwise_grouped_input_grad(
    dy: Array, codes: Array, scales: Array, grouping: Grouping, counts: np.ndarray
) -> Array:
    """dx [t, k] of dy [t, n]."""
    dx = array_module(dy).empty((len(dy), grouping.groups_in(scales) * grouping.size), dy.dtype)
    for i, rows in _groups(counts):
        groupwise_input_grad(dy[rows], codes[i], scales[i], grouping, out=dx[rows])
    return dx


def _groups(counts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each matrix that has rows, and which."""
    start = 0
    for i, count in enumerate(counts.tolist()):
        if count:
            yield i, slice(start, start + count)
        start += count
