"""The softmax's numerators over logits, and their sums, row by row."""

from __future__ import annotations

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.exp import exp
from mpitp.ops.compiled.primitives import row
from mpitp.ops.compiled.rows import row_sum


@compiled()
def exp_sums(logits: Array, row_max: Array, bounds: Array, e: Array, sums: Array) -> None:
    """e [t, v] = exp(logits - row_max), and sums [b, t] of e over the columns bounds[k, 0] .. bounds[k, 1] - 1."""
    for i in range(logits.shape[0]):
        logits_row, e_row = row(logits, i), row(e, i)
        largest = row_max[i]
        for j in range(logits_row.shape[0]):
            e_row[j] = exp(logits_row[j] - largest)
        for k in range(bounds.shape[0]):
            sums[k, i] = row_sum(e_row[bounds[k, 0] : bounds[k, 1]])
