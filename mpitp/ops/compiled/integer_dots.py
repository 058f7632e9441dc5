r"""Dot products of whole numbers, a row of w a lane: what `rounded.py` multiplies with.

    sums[i] += sum over j < 4 of w[i, j] * x[j]        w from 0 to 255, x from -127 to 127; for all lanes i at once

One instruction where the processor has it (vpdpbusd of AVX-512 VNNI and AVX-VNNI), else two products of 16-bit numbers
each. Sums of whole numbers are exact: every processor has the same ones.

Rows of w lie one behind the other, so four numbers of each of them are brought together first: 16 bytes of every row,
four rows side by side in a vector's quarters, then turned as four by four words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mpitp.ops.compiled.dots import BYTE, IS_WIDE, VECTOR_BYTES, WORD, lanes_of, load, processor_has, shuffled, splat

Value = Any
LANES = lanes_of(4)
PIECE = 16  # bytes of a row that are turned together
HAS_DOTS = processor_has("avx512vnni", "avx512vl") or (not IS_WIDE and processor_has("avxvnni"))
WORDS_OF_X = 1 if HAS_DOTS else 2  # for four numbers of x: as bytes, or as those at even and those at odd places
WORDS = ir.VectorType(WORD, LANES)
BYTES = ir.VectorType(BYTE, VECTOR_BYTES)
HALF = ir.IntType(16)
HALVES = ir.VectorType(HALF, VECTOR_BYTES // 2)


def transposed(builder: Value, rows: Sequence[Value], start: Value) -> list[Value]:
    """Four vectors of words: of each row's 16 bytes from `start` on the first words, the second ones, ..."""
    quarters = [
        _joined(builder, [load(builder, row, start, BYTE, PIECE) for row in rows[first::4]]) for first in range(4)
    ]
    a, b, c, d = (builder.bitcast(quarter, WORDS) for quarter in quarters)
    low = _interleaved(builder, a, b, 0), _interleaved(builder, c, d, 0)  # a0 b0 a1 b1, c0 d0 c1 d1
    high = _interleaved(builder, a, b, 2), _interleaved(builder, c, d, 2)
    return [_pairs(builder, ab, cd, first) for ab, cd in (low, high) for first in (0, 2)]


def add_products(builder: Value, sums: Value, w: Value, x: Sequence[Value]) -> Value:
    """sums + products of w (bytes of 0 to 255) and the same WORDS_OF_X words of x on all lanes."""
    if HAS_DOTS:
        return builder.call(_instruction(builder), [sums, builder.bitcast(w, WORDS), x[0]])
    whole = builder.bitcast(w, HALVES)
    even = builder.and_(whole, ir.Constant(HALVES, [255] * HALVES.count))
    odd = builder.lshr(whole, ir.Constant(HALVES, [8] * HALVES.count))
    for numbers, factors in ((even, x[0]), (odd, x[1])):
        sums = builder.add(sums, _pair_sums(builder, numbers, builder.bitcast(factors, HALVES)))
    return sums


def words_of_x(builder: Value, pointer: Value, place: Value) -> list[Value]:
    """The words at a place (of four numbers each) of a row of x, each on all lanes."""
    first = builder.mul(place, place.type(WORDS_OF_X))
    return [
        splat(builder, builder.load(builder.gep(pointer, [builder.add(first, first.type(i))])), LANES)
        for i in range(WORDS_OF_X)
    ]


def stored_numbers(builder: Value, numbers: Value) -> Value:
    """Whole numbers of -127 to 127 (words) of a row of x, as words that `words_of_x` reads."""
    count = numbers.type.count
    if HAS_DOTS:
        bytes_ = builder.trunc(numbers, ir.VectorType(BYTE, count))
        return builder.bitcast(bytes_, ir.VectorType(WORD, count // 4))
    halves = builder.trunc(numbers, ir.VectorType(HALF, count))
    places = [first + i for first in range(0, count, 4) for i in (0, 2, 1, 3)]
    return builder.bitcast(shuffled(builder, halves, halves, places), ir.VectorType(WORD, count // 2))


def _instruction(builder: Value) -> Value:
    name = f"llvm.x86.avx512.vpdpbusd.{8 * VECTOR_BYTES}"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(WORDS, [WORDS] * 3), name)


def _pair_sums(builder: Value, a: Value, b: Value) -> Value:
    """Words a[0] b[0] + a[1] b[1], a[2] b[2] + a[3] b[3], ... of 16-bit numbers."""
    if processor_has("avx2"):
        name = "llvm.x86.avx512.pmaddw.d.512" if VECTOR_BYTES == 64 else "llvm.x86.avx2.pmadd.wd"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WORDS, [HALVES] * 2), name)
        return builder.call(function, [a, b])
    products = []
    for first in (0, 1):
        places = range(first, HALVES.count, 2)
        numbers = [builder.sext(shuffled(builder, each, each, places), WORDS) for each in (a, b)]
        products.append(builder.mul(*numbers))
    return builder.add(*products)


def _joined(builder: Value, parts: list[Value]) -> Value:
    """Vectors one behind the other in one."""
    while len(parts) > 1:
        count = parts[0].type.count
        parts = [shuffled(builder, a, b, range(2 * count)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _interleaved(builder: Value, a: Value, b: Value, first: int) -> Value:
    """Of each quarter: a[first], b[first], a[first + 1], b[first + 1]."""
    places = [q + i + side for q in range(0, LANES, 4) for i in (first, first + 1) for side in (0, LANES)]
    return shuffled(builder, a, b, places)


def _pairs(builder: Value, a: Value, b: Value, first: int) -> Value:
    """Of each quarter: a[first], a[first + 1], b[first], b[first + 1]."""
    places = [q + i + side for q in range(0, LANES, 4) for side in (0, LANES) for i in (first, first + 1)]
    return shuffled(builder, a, b, places)
