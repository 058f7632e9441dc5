r"""y = x w^T for a few rows of x and weights in 8 or 4 bits, groups of 32: as fast as the codes can be read.

A row of w is read from memory once. A group's 32 codes become floats in vector registers and are multiplied with x and
with the group's scale there; 2 x 16 sums run side by side and are added up at the row's end. Four rows of x go
together: the codes are widened once for them. The order of a dot product is always the same, however many rows of x
there are.

Numba's compiler doesn't turn loops over 32 small numbers into vector instructions, so these are written out (`_dot`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import LINE_BYTES, Array, aligned_zeros
from mpitp.ops.compiled.prefetch import prefetch
from mpitp.ops.compiled.primitives import row

AHEAD_BYTES = 4 * 1024  # between the codes that are multiplied and those that are asked for
GROUP, LANES = 32, 16  # codes of a group; of them side by side
TOGETHER = 4  # rows of x
BYTE, WORD, FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
SUMS = ir.VectorType(FLOAT, LANES)
Value = Any


def few_rows(x: Array, codes: Array, scales: Array, bits: int, out: Array) -> None:
    """Write y [t, n] of x [t, k] (float32), codes [n, k * bits / 8] and scales [n, k/32] (float32)."""
    t, k = x.shape
    fours = (t + 1) // TOGETHER * TOGETHER  # three are taken as four: a row of zeros costs less than two rows alone
    aligned = aligned_zeros((max(t, fours), k), x.dtype)
    aligned[:t] = x
    y = out if fours <= t else np.empty((fours, out.shape[1]), out.dtype)
    blocks = aligned[:fours].reshape(-1, TOGETHER, k)
    (_eight_bits if bits == 8 else _four_bits)(blocks, aligned[fours:], codes, scales, y)
    if y is not out:
        out[...] = y[:t]


@compiled()
def _eight_bits(blocks: Array, rest: Array, codes: Array, scales: Array, y: Array) -> None:
    """y [4 b + r, n] of x in blocks [b, 4, k] and rows [r, k]."""
    for i in range(y.shape[1]):
        code, scale = row(codes, i), row(scales, i)
        for j in range(0, code.shape[0], LINE_BYTES):
            prefetch(code, j + AHEAD_BYTES)
        t = 0
        for b in range(blocks.shape[0]):
            y[t, i], y[t + 1, i], y[t + 2, i], y[t + 3, i] = _four_dots_of_8_bits(code, scale, blocks[b])
            t += 4
        for r in range(rest.shape[0]):
            y[t + r, i] = _dot_of_8_bits(code, scale, rest[r])


@compiled()
def _four_bits(blocks: Array, rest: Array, codes: Array, scales: Array, y: Array) -> None:
    """The same."""
    for i in range(y.shape[1]):
        code, scale = row(codes, i), row(scales, i)
        for j in range(0, code.shape[0], LINE_BYTES):
            prefetch(code, j + AHEAD_BYTES)
        t = 0
        for b in range(blocks.shape[0]):
            y[t, i], y[t + 1, i], y[t + 2, i], y[t + 3, i] = _four_dots_of_4_bits(code, scale, blocks[b])
            t += 4
        for r in range(rest.shape[0]):
            y[t + r, i] = _dot_of_4_bits(code, scale, rest[r])


@intrinsic
def _dot_of_8_bits(typing_context: Any, codes: Any, scales: Any, x: Any) -> Any:
    """The sum over groups g of scales[g] * (codes of g) . (x of g): int8 [k], float32 [k/32], float32 [k]."""
    return _signature(codes, types.int8, scales, x), _generator(GROUP, _widen_8_bits)


@intrinsic
def _dot_of_4_bits(typing_context: Any, codes: Any, scales: Any, x: Any) -> Any:
    """The same of uint8 [k/2]: low halves are the first 16 codes of a group, high ones the others, each 8 too large."""
    return _signature(codes, types.uint8, scales, x), _generator(GROUP // 2, _widen_4_bits)


@intrinsic
def _four_dots_of_8_bits(typing_context: Any, codes: Any, scales: Any, x: Any) -> Any:
    """Four sums, of x [4, k]."""
    return _signature(codes, types.int8, scales, x, TOGETHER), _generator(GROUP, _widen_8_bits, TOGETHER)


@intrinsic
def _four_dots_of_4_bits(typing_context: Any, codes: Any, scales: Any, x: Any) -> Any:
    """Four sums, of x [4, k]."""
    return _signature(codes, types.uint8, scales, x, TOGETHER), _generator(GROUP // 2, _widen_4_bits, TOGETHER)


def _signature(codes: Any, kind: Any, scales: Any, x: Any, rows: int = 1) -> Any:
    for array, dtype, ndim in ((codes, kind, 1), (scales, types.float32, 1), (x, types.float32, min(rows, 2))):
        if not (isinstance(array, types.Array) and array.ndim == ndim and array.layout == "C" and array.dtype == dtype):
            return None
    sums = types.float32 if rows == 1 else types.UniTuple(types.float32, rows)
    return sums(codes, scales, x)


def _widen_8_bits(builder: Value, packed: Value) -> list[Value]:
    """<32 x i8> -> 2 times <16 x float>."""
    halves = [_part(builder, packed, first, LANES) for first in (0, LANES)]
    return [builder.sitofp(builder.sext(half, ir.VectorType(WORD, LANES)), SUMS) for half in halves]


def _widen_4_bits(builder: Value, packed: Value) -> list[Value]:
    """<16 x i8> of two codes each -> 2 times <16 x float>."""
    words = ir.VectorType(WORD, LANES)
    pairs = builder.zext(packed, words)
    low = builder.and_(pairs, ir.Constant(words, [15] * LANES))
    high = builder.lshr(pairs, ir.Constant(words, [4] * LANES))
    return [builder.sitofp(builder.sub(code, ir.Constant(words, [8] * LANES)), SUMS) for code in (low, high)]


def _generator(group_bytes: int, widen: Any, rows: int = 1) -> Any:
    """What writes the loop over the groups of a row of w, for so many rows of x: their sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes, scales, x = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        groups = cgutils.unpack_tuple(builder, scales.shape, 1)[0]
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(SUMS, [SUMS] * 3), f"llvm.fma.v{LANES}f32")
        k = cgutils.unpack_tuple(builder, x.shape)[-1]
        zeros = ir.Constant(SUMS, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(2)] for _ in range(rows)]
        with cgutils.for_range(builder, groups) as loop:
            first = builder.mul(loop.index, loop.index.type(group_bytes))
            halves = widen(builder, _vector(builder, codes.data, first, BYTE, group_bytes))
            scale = _splat(builder, builder.load(builder.gep(scales.data, [loop.index])))
            for half, codes_of_half in enumerate(halves):
                start = builder.add(builder.mul(loop.index, loop.index.type(GROUP)), loop.index.type(half * LANES))
                for r in range(rows):
                    place = builder.add(start, builder.mul(k, k.type(r)))
                    products = builder.fmul(codes_of_half, _vector(builder, x.data, place, FLOAT, LANES))
                    builder.store(builder.call(fma, [products, scale, builder.load(sums[r][half])]), sums[r][half])
        dots = [_added_up(builder, builder.fadd(*(builder.load(total) for total in of_row))) for of_row in sums]
        return dots[0] if rows == 1 else context.make_tuple(builder, signature.return_type, dots)

    return generate


def _part(builder: Value, vector: Value, first: int, length: int) -> Value:
    """`length` elements of a vector from `first` on."""
    order = ir.Constant(ir.VectorType(WORD, length), list(range(first, first + length)))
    return builder.shuffle_vector(vector, vector, order)


def _vector(builder: Value, data: Value, start: Value, kind: Any, length: int) -> Value:
    """`length` neighbours from data[start] on."""
    pointer = builder.bitcast(builder.gep(data, [start]), ir.VectorType(kind, length).as_pointer())
    return builder.load(pointer, align=kind.width // 8 if isinstance(kind, ir.IntType) else 4)


def _splat(builder: Value, scalar: Value) -> Value:
    """The number on all lanes."""
    undefined = ir.Constant(SUMS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(WORD, LANES), [0] * LANES))


def _added_up(builder: Value, lanes: Value) -> Value:
    """The sum of a vector's elements: halves onto each other until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = builder.fadd(*(_part(builder, lanes, first, width) for first in (0, width)))
    return builder.extract_element(lanes, WORD(0))
