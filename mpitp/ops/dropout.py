"""Dropout (Srivastava et al. 2014): y = x * mask with a mask of 0 and 1/(1 - rate) made by `backend.rng`.

The backward is the same product: dx = dy * mask. The mask depends on global indices alone, so it can be made again
instead of kept.
"""

from __future__ import annotations

from mpitp.backend.arrays import Array
from mpitp.ops.wide import by_wide_rows


@by_wide_rows
def dropout_forward(x: Array, mask: Array) -> Array:
    """x * mask, elementwise."""
    return x * mask
