r"""Products with weights in 8 or 4 bits (`groupwise.py`) whose input is rounded too, to 8 bits in the same groups.

    x[r, j] ~ q[r, j] * s_x[r, j // g]        s_x = max |x| / 127 over the group, q = x / s_x rounded, from -127 to 127

    y[r, i] = sum over groups of  (sum over j of c[i, j] q[r, j]) * (s[i] * s_x[r])  + m[i] * (s_x[r] * sum of q[r, j])

with the last summand where weights have least values. The products of whole numbers and their sums are exact; each
group's term is added to those before it in float32. That is what processors multiply fastest, and how llama.cpp
multiplies (its q8_0 activations). The order is fixed, so that y has the same bits compiled or not, and in any company.
A group that isn't finite becomes NaN; one below the smallest normal numbers becomes 0.
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.ops.groupwise import GROUP_SIZE, Grouping, whole_numbers

LARGEST = 127
BAND_BYTES = 2**20  # of whole numbers that are multiplied together: with fewer NumPy's calls cost more than its work


def round_rows(x: Array, size: int) -> tuple[Array, Array]:
    """q [t, k] as float32 of whole numbers, and s_x [t, k/size], of x [t, k]."""
    xp = array_module(x)
    groups = x.astype(np.float32, copy=False).reshape(len(x), x.shape[1] // size, size)
    scales = xp.abs(groups).max(axis=2) / np.float32(LARGEST)
    is_finite = scales < np.float32(np.inf)
    is_usable = is_finite & (scales >= np.finfo(np.float32).tiny)
    inverse = is_usable / xp.where(is_usable, scales, np.float32(1))
    q = xp.rint(xp.where(is_usable[..., None], groups, np.float32(0)) * inverse.astype(np.float32)[..., None])
    small = xp.where(is_finite, np.float32(0), np.float32(np.nan))
    return q.reshape(x.shape), xp.where(is_usable, scales, small)


def rounded_forward(x: Array, codes: Array, scales: Array, grouping: Grouping, out: Array | None = None) -> Array:
    """y [t, n] of x [t, k], codes [n, k * bits / 8] and scales [n, k/g] ([n, 2 k/g] with least values); written to
    `out` when given.
    """
    xp = array_module(x)
    y = xp.empty((len(x), len(scales)), x.dtype) if out is None else out
    if y.size == 0 or x.shape[1] == 0:
        y[...] = 0
    elif _is_compiled(x, scales, grouping):
        from mpitp.ops.compiled.rounded import rounded_products

        rounded_products(x, codes, scales, grouping, y)
    else:
        q, s_x = round_rows(x, grouping.size)
        step = max(16, BAND_BYTES // (4 * x.shape[1]))
        for i in range(0, len(scales), step):
            rows = slice(i, i + step)
            y[:, rows] = _terms_added(q, s_x, codes[rows], scales[rows], grouping)
    return y


def _terms_added(q: Array, s_x: Array, codes: Array, scales: Array, grouping: Grouping) -> Array:
    """y [t, n] of some rows of w."""
    xp, (t, groups), n = array_module(q), s_x.shape, len(scales)
    by_group = q.reshape(t, groups, grouping.size).transpose(1, 0, 2)
    whole = whole_numbers(codes, groups, grouping).transpose(1, 2, 0)  # [k/g, g, n]
    sums = xp.matmul(by_group, whole)  # [k/g, t, n], exact: below 2^24
    of_w = xp.ascontiguousarray(scales.astype(np.float32, copy=False).T).reshape(groups, grouping.group_floats, n)
    of_least = s_x * q.reshape(t, groups, grouping.size).sum(axis=2) if grouping.has_least else s_x  # [t, k/g]
    y, term, least = xp.zeros((t, n), np.float32), xp.empty((t, n), np.float32), xp.empty((t, n), np.float32)
    for g in range(groups):
        xp.multiply(of_w[g, 0], s_x[:, g, None], out=term)
        term *= sums[g]
        if grouping.has_least:
            xp.multiply(of_w[g, 1], of_least[:, g, None], out=least)
            term += least
        y += term
    return y


def _is_compiled(x: Array, scales: Array, grouping: Grouping) -> bool:
    """Whether the compiled kernels take these arrays."""
    is_kind = x.dtype == np.float32 and scales.dtype == np.float32 and grouping.size == GROUP_SIZE
    return is_kind and is_accelerated(array_module(x), x.dtype)
