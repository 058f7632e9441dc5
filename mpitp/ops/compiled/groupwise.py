r"""y = x w^T for a few rows of x and weights in 8 or 4 bits, groups of 32: as fast as the codes can be read.

A row of w is read from memory once. A group's codes become floats in vector registers and are multiplied with the
group's scale there, exactly: a code has 8 bits, a scale 11 (or 4 and 17), so that their product fits a float32; a least
value is added by a fused multiply-add. One row of x is
multiplied at once; for more, the floats of some rows of w are put into the first-level cache and multiplied like any
others (`few_rows.py`). Both take a dot product in the same order: it has the bits of the product with the widened
matrix, and they don't depend on how many rows of x go along.

Numba's compiler doesn't turn loops over 32 small numbers into vector instructions, so these are written out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.dots import (
    BYTE,
    OF_W,
    WORD,
    added_up,
    ask_for,
    fused,
    lanes_of,
    load,
    packed_rows,
    put,
    row_pointer,
    splat,
)
from mpitp.ops.compiled.few_rows import multiply_block
from mpitp.ops.groupwise import Grouping

AHEAD_BYTES = 4 * 1024  # between the codes that are multiplied and those that are asked for
GROUP = 32  # codes
FLOAT = ir.FloatType()
LANES = lanes_of(4)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(WORD, LANES)
Value = Any


def few_rows(x: Array, codes: Array, scales: Array, grouping: Grouping, out: Array) -> None:
    """Write y [t, n] of x [t, k] (float32), codes [n, k * bits / 8] and scales [n, k/32] (float32), [n, 2 k/32] with
    least values.
    """
    fits = out.strides[1] == out.itemsize
    y = out if fits else np.empty(out.shape, x.dtype)
    (_eight_bits if grouping.bits == 8 else _four_bits)(x, codes, _by_group(scales, grouping), y, AHEAD_BYTES)
    if not fits:
        out[...] = y


def widen(codes: Array, scales: Array, grouping: Grouping, out: Array) -> None:
    """Write w [n, k], contiguous, of codes and scales as in `few_rows`."""
    kernel = _widen_all_8_bits if grouping.bits == 8 else _widen_all_4_bits
    kernel(codes, _by_group(scales, grouping), out, AHEAD_BYTES)


def _by_group(scales: Array, grouping: Grouping) -> Array:
    """[n, k/32], or [n, k/32, 2] where a least value stands behind each scale: kernels are compiled for either."""
    return scales.reshape(len(scales), -1, 2) if grouping.has_least else scales


@compiled()
def _widen_all_8_bits(codes: Array, scales: Array, out: Array, ahead: int) -> None:
    for i in range(scales.shape[0]):
        _widen_8_bits(codes, scales, i, out, i, ahead)


@compiled()
def _widen_all_4_bits(codes: Array, scales: Array, out: Array, ahead: int) -> None:
    for i in range(scales.shape[0]):
        _widen_4_bits(codes, scales, i, out, i, ahead)


@compiled()
def _eight_bits(x: Array, codes: Array, scales: Array, y: Array, ahead: int) -> None:
    n, k = scales.shape[0], x.shape[1]
    rows, whole = packed_rows(x, k), n - n % OF_W
    if x.shape[0] == 1:
        for i in range(0, whole, OF_W):
            _dots_of_8_bits(codes, scales, i, rows, y, ahead)
        for i in range(whole, n):
            _dot_of_8_bits(codes, scales, i, rows, y, ahead)
        return
    floats = packed_rows(np.zeros((OF_W, 0), np.float32), k)
    for i in range(0, n, OF_W):
        of_w = min(OF_W, n - i)
        for a in range(of_w):
            _widen_8_bits(codes, scales, i + a, floats, a, ahead)
        multiply_some(rows, floats, of_w, y, i)


@compiled()
def _four_bits(x: Array, codes: Array, scales: Array, y: Array, ahead: int) -> None:
    n, k = scales.shape[0], x.shape[1]
    rows, whole = packed_rows(x, k), n - n % OF_W
    if x.shape[0] == 1:
        for i in range(0, whole, OF_W):
            _dots_of_4_bits(codes, scales, i, rows, y, ahead)
        for i in range(whole, n):
            _dot_of_4_bits(codes, scales, i, rows, y, ahead)
        return
    floats = packed_rows(np.zeros((OF_W, 0), np.float32), k)
    for i in range(0, n, OF_W):
        of_w = min(OF_W, n - i)
        for a in range(of_w):
            _widen_4_bits(codes, scales, i + a, floats, a, ahead)
        multiply_some(rows, floats, of_w, y, i)


@compiled(inline=True)
def multiply_some(x: Array, w: Array, of_w: int, y: Array, column: int) -> None:
    """y[:, column + a] of all rows of x and the first `of_w` rows of w."""
    if of_w == OF_W:
        multiply_block(x, w, 0, y, column, 0)
        return
    room = np.empty((x.shape[0], OF_W), x.dtype)
    multiply_block(x, w, 0, room, 0, 0)
    y[:, column : column + of_w] = room[:, :of_w]


def _dots(bits: int, of_w: int) -> Any:
    """A kernel's call `f(codes, scales, i, x, y, ahead)`: y[0, i + a] of x [1, k] for all a < of_w."""

    @intrinsic
    def dots(typing_context: Any, codes: Any, scales: Any, i: Any, x: Any, y: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, i, x, y, ahead = _opened(context, builder, signature, arguments)
            has_least = signature.args[1].ndim == 3
            rows = [_row(builder, codes, scales, builder.add(i, i.type(a))) for a in range(of_w)]
            x_row = row_pointer(builder, x, i.type(0))
            sums = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * LANES)) for _ in rows]
            fma = fused(builder, FLOATS)
            with cgutils.for_range(builder, _groups(builder, scales)) as loop:
                floats = [_widened(builder, *of_row, loop.index, bits, has_least, ahead) for of_row in rows]
                for part in range(GROUP // LANES):
                    start = builder.add(builder.mul(loop.index, i.type(GROUP)), i.type(part * LANES))
                    factor = load(builder, x_row, start, FLOAT, LANES)
                    for total, of_row in zip(sums, floats, strict=True):
                        builder.store(builder.call(fma, [of_row[part], factor, builder.load(total)]), total)
            added = added_up(builder, [builder.load(total) for total in sums])
            put(builder, added, row_pointer(builder, y, i.type(0)), i)
            return context.get_dummy_value()

        return types.void(codes, scales, types.intp, x, y, types.intp), generate

    return dots


def _widen(bits: int) -> Any:
    """A kernel's call `f(codes, scales, i, out, a, ahead)`: out[a] [k] becomes row i of w."""

    @intrinsic
    def widen(typing_context: Any, codes: Any, scales: Any, i: Any, out: Any, a: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, i, out, a, ahead = _opened(context, builder, signature, arguments)
            has_least = signature.args[1].ndim == 3
            of_row, target = _row(builder, codes, scales, i), row_pointer(builder, out, a)
            with cgutils.for_range(builder, _groups(builder, scales)) as loop:
                first = builder.mul(loop.index, i.type(GROUP))
                widened = _widened(builder, *of_row, loop.index, bits, has_least, ahead)
                for part, floats in enumerate(widened):
                    put(builder, floats, target, builder.add(first, i.type(part * LANES)))
            return context.get_dummy_value()

        return types.void(codes, scales, types.intp, out, types.intp, types.intp), generate

    return widen


_dots_of_8_bits, _dot_of_8_bits, _widen_8_bits = _dots(8, OF_W), _dots(8, 1), _widen(8)
_dots_of_4_bits, _dot_of_4_bits, _widen_4_bits = _dots(4, OF_W), _dots(4, 1), _widen(4)


def _opened(context: Any, builder: Value, signature: Any, arguments: Any) -> list[Any]:
    """The arguments, arrays as what knows their data, shape and strides."""
    return [
        context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


def _row(builder: Value, codes: Value, scales: Value, i: Value) -> tuple[Value, Value]:
    """Where row i has its codes and its scales."""
    pointer = builder.bitcast(row_pointer(builder, codes, i), BYTE.as_pointer())
    return pointer, row_pointer(builder, scales, i)


def _groups(builder: Value, scales: Value) -> Value:
    return cgutils.unpack_tuple(builder, scales.shape, 2)[1]


def _widened(
    builder: Value, codes: Value, scales: Value, group: Value, bits: int, has_least: bool, ahead: Value
) -> list[Value]:
    """The 32 numbers of a group, in vectors."""
    length = GROUP * bits // 8
    first = builder.mul(group, group.type(length))
    ask_for(builder, cgutils.pointer_add(builder, builder.gep(codes, [first]), ahead))
    place = builder.mul(group, group.type(2)) if has_least else group
    scale = builder.load(builder.gep(scales, [place]))
    scale_of_all = splat(builder, scale, LANES)
    if bits == 8:
        starts = [builder.add(first, first.type(start)) for start in range(0, GROUP, LANES)]
        whole = [builder.sext(load(builder, codes, start, BYTE, LANES), WORDS) for start in starts]
        return [builder.fmul(builder.sitofp(numbers, FLOATS), scale_of_all) for numbers in whole]
    fma = fused(builder, FLOATS)
    if has_least:
        least = builder.load(builder.gep(scales, [builder.add(place, place.type(1))]))
    else:
        least = builder.fmul(scale, FLOAT(-8.0))
    least_of_all = splat(builder, least, LANES)
    starts = [builder.add(first, first.type(start)) for start in range(0, length, LANES)]
    pairs = [builder.zext(load(builder, codes, start, BYTE, LANES), WORDS) for start in starts]
    low = [builder.and_(pair, ir.Constant(WORDS, [15] * LANES)) for pair in pairs]
    high = [builder.lshr(pair, ir.Constant(WORDS, [4] * LANES)) for pair in pairs]
    # rounded once; code * scale - 8 * scale is (code - 8) * scale, which needs no rounding
    return [builder.call(fma, [builder.sitofp(code, FLOATS), scale_of_all, least_of_all]) for code in (*low, *high)]
