r"""Dot products side by side: a few rows of w with a few rows of x, as many as the vector registers hold sums for.

    y[r + c, i + a] = sum over j of w[i + a, j] * x[r + c, j]        a < OF_W, c <= OF_X, all at once

Every number that is loaded takes part in several products. A sum has a partial sum for each lane of a vector, over
every LANES-th j, in their order, by fused multiply-adds; at the end these are added half onto half. That order depends
on k alone, so a dot product's bits don't depend on how many others stand beside it.

Numba's compiler holds no block of sums in registers, so the instructions are written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import LINE_BYTES, Array

Value = Any


def processor_has(*features: str) -> bool:
    """Whether code may use all of these, by LLVM's names: those that Numba compiles for (NUMBA_CPU_FEATURES)."""
    told = config.CPU_FEATURES
    found = llvm.get_host_cpu_features() if told is None else {word[1:]: word[0] == "+" for word in told.split(",")}
    return all(found.get(feature, False) for feature in features)


IS_WIDE = processor_has("avx512f")  # 32 registers of 64 bytes; else 16 of 32, as a rule
VECTOR_BYTES = 64 if IS_WIDE else 32
OF_W, OF_X = (4, 4) if IS_WIDE else (2, 4)
WORD, BYTE = ir.IntType(32), ir.IntType(8)
READ, FIRST_LEVEL_CACHE, SECOND_LEVEL_CACHE, DATA = 0, 3, 2, 1  # the operands of llvm.prefetch


def lanes_of(itemsize: int) -> int:
    """Numbers of a vector."""
    return VECTOR_BYTES // itemsize


def block(of_w: int, of_x: int) -> Any:
    """A kernel's call `f(w, i, x, r, y, column, ahead)`: y[r + c, column + a] for all a < of_w and c < of_x.

    w [n, k] has rows without gaps within; x [t, k'] is contiguous, with zeros from k to k', a multiple of LANES; the
    rows of y have no gaps within. The memory `ahead` bytes behind the numbers of w that are read is asked for.
    """

    @intrinsic
    def dots(typing_context: Any, w: Any, i: Any, x: Any, r: Any, y: Any, column: Any, ahead: Any) -> Any:
        if not all(isinstance(array, types.Array) and array.ndim == 2 for array in (w, x, y)) or x.layout != "C":
            return None
        signature = types.void(w, types.intp, x, types.intp, y, types.intp, types.intp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _write(context, builder, signature, arguments, of_w, of_x)
            return context.get_dummy_value()

        return signature, generate

    return dots


def _write(context: Any, builder: Any, signature: Any, arguments: Any, of_w: int, of_x: int) -> None:
    """The instructions of a block."""
    w, i, x, r, y, column, ahead = (
        context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, arguments, strict=True)
    )
    kind = context.get_data_type(signature.args[0].dtype)
    lanes = lanes_of(context.get_abi_sizeof(kind))
    vector = ir.VectorType(kind, lanes)
    w_rows = [row_pointer(builder, w, builder.add(i, i.type(a))) for a in range(of_w)]
    x_rows = [row_pointer(builder, x, builder.add(r, r.type(c))) for c in range(of_x)]
    sums = [[cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * lanes)) for _ in x_rows] for _ in w_rows]
    fma = fused(builder, vector)

    def step(start: Value, of_w_rows: Sequence[Value]) -> None:
        for c, x_row in enumerate(x_rows):
            factor = load(builder, x_row, start, kind, lanes)
            for a, number in enumerate(of_w_rows):
                total = builder.load(sums[a][c])
                builder.store(builder.call(fma, [number, factor, total]), sums[a][c])

    k = cgutils.unpack_tuple(builder, w.shape, 2)[1]
    whole = builder.and_(k, k.type(-lanes))
    with cgutils.for_range_slice(builder, k.type(0), whole, k.type(lanes), k.type) as (start, _):
        for pointer in w_rows:
            ask_for(builder, cgutils.pointer_add(builder, builder.gep(pointer, [start]), ahead))
        step(start, [load(builder, pointer, start, kind, lanes) for pointer in w_rows])
    with builder.if_then(builder.icmp_signed("<", whole, k), likely=False):
        step(whole, [_rest(builder, pointer, whole, k, vector) for pointer in w_rows])
    for c in range(of_x):
        added = added_up(builder, [builder.load(of_row[c]) for of_row in sums])
        put(builder, added, row_pointer(builder, y, builder.add(r, r.type(c))), column)


def row_pointer(builder: Value, array: Value, i: Value) -> Value:
    """Of array[i], an array of two dims."""
    stride = cgutils.unpack_tuple(builder, array.strides, 2)[0]
    return cgutils.pointer_add(builder, array.data, builder.mul(i, stride))


def load(builder: Value, pointer: Value, start: Value, kind: Any, length: int) -> Value:
    """`length` neighbours from pointer[start] on, wherever they lie."""
    place = builder.bitcast(builder.gep(pointer, [start]), ir.VectorType(kind, length).as_pointer())
    return builder.load(place, align=1 if kind == BYTE else 4)


def put(builder: Value, numbers: Value, pointer: Value, start: Value) -> None:
    """Write a vector, or one number, to pointer[start] and what follows."""
    place = builder.gep(pointer, [start])
    builder.store(numbers, builder.bitcast(place, numbers.type.as_pointer()), align=4)


def added_up(builder: Value, vectors: Sequence[Value]) -> Value:
    """The sums of 1, 2 or 4 vectors' elements, one after the other in a vector of so many: half onto half."""
    width = vectors[0].type.count
    while width > (4 if len(vectors) > 1 else 1):
        width //= 2
        vectors = [
            builder.fadd(*(shuffled(builder, v, v, range(first, first + width)) for first in (0, width)))
            for v in vectors
        ]
    if len(vectors) == 1:
        return vectors[0]
    pairs = [
        builder.fadd(shuffled(builder, a, b, [0, 1, 4, 5]), shuffled(builder, a, b, [2, 3, 6, 7]))
        for a, b in zip(vectors[::2], vectors[1::2], strict=True)
    ]
    even, odd = range(0, 2 * len(vectors), 2), range(1, 2 * len(vectors), 2)
    return builder.fadd(*(shuffled(builder, pairs[0], pairs[-1], places) for places in (even, odd)))


def splat(builder: Value, scalar: Value, lanes: int) -> Value:
    """The number on all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(WORD, lanes), [0] * lanes))


def shuffled(builder: Value, a: Value, b: Value, places: Sequence[int]) -> Value:
    """A vector of the elements at these places of a and, from a's length on, of b."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(places)), list(places)))


def _rest(builder: Value, pointer: Value, start: Value, stop: Value, vector: Any) -> Value:
    """The numbers pointer[start] .. pointer[stop - 1] and zeros."""
    room = cgutils.alloca_once(builder, vector)
    builder.store(ir.Constant(vector, [0.0] * vector.count), room)
    numbers = builder.bitcast(room, vector.element.as_pointer())
    with cgutils.for_range(builder, builder.sub(stop, start)) as loop:
        number = builder.load(builder.gep(pointer, [builder.add(start, loop.index)]))
        builder.store(number, builder.gep(numbers, [loop.index]))
    return builder.load(room)


def fused(builder: Value, vector: Any) -> Value:
    """The function a * b + c of vectors, rounded once."""
    bits = {ir.FloatType(): 32, ir.DoubleType(): 64}[vector.element]
    name = f"llvm.fma.v{vector.count}f{bits}"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)


def ask_for(builder: Value, pointer: Value, cache: int = SECOND_LEVEL_CACHE) -> None:
    """Have the cache line at a pointer brought to a cache; beyond all arrays nothing happens."""
    address, number = BYTE.as_pointer(), WORD
    instruction = builder.module.declare_intrinsic(
        "llvm.prefetch", [address], ir.FunctionType(ir.VoidType(), [address, number, number, number])
    )
    level = [number(READ), number(cache), number(DATA)]
    builder.call(instruction, [builder.bitcast(pointer, address), *level])


@compiled(inline=True)
def packed_rows(x: Array, width: int) -> Array:
    """x [t, k] and zeros to [t, width], beginning where a cache line does: it is read again for each row of w."""
    t, k = x.shape
    memory = np.empty(t * width + LINE_BYTES // x.itemsize, x.dtype)
    start = -memory.ctypes.data % LINE_BYTES // x.itemsize
    packed = memory[start : start + t * width].reshape(t, width)
    for i in range(t):
        for j in range(k):
            packed[i, j] = x[i, j]
        for j in range(k, width):
            packed[i, j] = 0.0
    return packed
