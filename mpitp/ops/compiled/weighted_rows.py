r"""Weighted sums of neighbouring rows, for a few sets of weights at once, their sums held in vector registers.

    y[r + c, j] += sum over a < count of p[r + c, first + a] * w[i + a, j]        c < of_y, in the order of a

Every row that is loaded takes part in the sums of all sets. A sum is made by fused multiply-adds, one row after the
other, so its bits depend neither on how many sets stand beside it nor on where a run of rows is cut.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.dots import fused, lanes_of, load, put, row_pointer, splat
from mpitp.ops.compiled.primitives import fma

VECTORS = 2  # of a row at a time: with four sets, eight sums are under way, as many as the unit can begin meanwhile
Value = Any


def _sums(of_y: int) -> Any:
    """A kernel's call `f(p, r, first, w, i, count, y, column)`: VECTORS vectors of columns from `column` on."""

    @intrinsic
    def sums(typing_context: Any, p: Any, r: Any, first: Any, w: Any, i: Any, count: Any, y: Any, column: Any) -> Any:
        if not all(isinstance(array, types.Array) and array.ndim == 2 for array in (p, w, y)):
            return None
        signature = types.void(p, types.intp, types.intp, w, types.intp, types.intp, y, types.intp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _write(context, builder, signature, arguments, of_y)
            return context.get_dummy_value()

        return signature, generate

    return sums


def _write(context: Any, builder: Any, signature: Any, arguments: Any, of_y: int) -> None:
    """The instructions."""
    p, r, first, w, i, count, y, column = (
        context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, arguments, strict=True)
    )
    kind = context.get_data_type(signature.args[0].dtype)
    lanes = lanes_of(context.get_abi_sizeof(kind))
    vector = ir.VectorType(kind, lanes)
    columns = [builder.add(column, column.type(part * lanes)) for part in range(VECTORS)]
    y_rows = [row_pointer(builder, y, builder.add(r, r.type(c))) for c in range(of_y)]
    weights = [builder.gep(row_pointer(builder, p, builder.add(r, r.type(c))), [first]) for c in range(of_y)]
    sums = [[cgutils.alloca_once_value(builder, load(builder, row, j, kind, lanes)) for j in columns] for row in y_rows]
    multiply_add = fused(builder, vector)
    with cgutils.for_range(builder, count) as loop:
        row = row_pointer(builder, w, builder.add(i, loop.index))
        numbers = [load(builder, row, j, kind, lanes) for j in columns]
        for weight, of_row in zip(weights, sums, strict=True):
            factor = splat(builder, builder.load(builder.gep(weight, [loop.index])), lanes)
            for total, number in zip(of_row, numbers, strict=True):
                builder.store(builder.call(multiply_add, [number, factor, builder.load(total)]), total)
    for row, of_row in zip(y_rows, sums, strict=True):
        for j, total in zip(columns, of_row, strict=True):
            put(builder, builder.load(total), row, j)


_four, _three, _two, _one = (_sums(of_y) for of_y in (4, 3, 2, 1))


@compiled(inline=True)
def add_weighted_rows(
    p: Array, start: int, stop: int, first: int, w: Array, i: int, count: int, y: Array, width: int
) -> None:
    """Add to rows start .. stop - 1 of y [t, d] the rows i .. i + count - 1 of w [n, d], weighed by p [t, u] from
    column `first` on; `width`: columns that are done at a time, VECTORS vectors.
    """
    d = w.shape[1]
    whole = d - d % width
    for column in range(0, whole, width):
        r = start
        while stop - r >= 4:
            _four(p, r, first, w, i, count, y, column)
            r += 4
        if stop - r == 3:
            _three(p, r, first, w, i, count, y, column)
        elif stop - r == 2:
            _two(p, r, first, w, i, count, y, column)
        elif stop - r == 1:
            _one(p, r, first, w, i, count, y, column)
    for r in range(start, stop):
        for column in range(whole, d):
            total = y[r, column]
            for a in range(count):
                total = fma(w[i + a, column], p[r, first + a], total)
            y[r, column] = total
