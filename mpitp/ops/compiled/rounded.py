r"""y = x w^T where x is rounded too: whole numbers times whole numbers, the compiled twin of `ops/rounded.py`.

    y[r, i] = sum over groups of  (sum over j of c[i, j] q[r, j]) * (s[i] * s_x[r])  + m[i] * (s_x[r] * sum of q[r, j])

The sums of a group are exact, and its term is added to those before it in float32, each operation rounded by itself: so
y has the bits of the plain expression, on every processor and in any company.

A lane of a vector is a row of w. One or two rows of x are multiplied straight from the codes; for more, a band of rows
of w is brought into that order once, in the first-level cache, and multiplied with four rows of x at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import LINE_BYTES, Array
from mpitp.ops.compiled.dots import (
    BYTE,
    FIRST_LEVEL_CACHE,
    IS_WIDE,
    VECTOR_BYTES,
    WORD,
    ask_for,
    load,
    put,
    row_pointer,
    splat,
)
from mpitp.ops.compiled.integer_dots import (
    BYTES,
    LANES,
    WORDS,
    WORDS_OF_X,
    add_products,
    stored_numbers,
    transposed,
    words_of_x,
)
from mpitp.ops.groupwise import Grouping

GROUP = 32
BAND = 2 * LANES if IS_WIDE else LANES  # rows of w that are multiplied together: as the registers hold sums for
VECTORS = BAND // LANES
PLACES = GROUP // 4  # of four numbers each
WORDS_A_GROUP = PLACES * WORDS_OF_X  # of a row of x
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
FEW = 2  # rows of x up to here take the codes as they lie
Value = Any


def rounded_products(x: Array, codes: Array, scales: Array, grouping: Grouping, out: Array) -> None:
    """Write y [t, n] of x [t, k] (float32), codes [n, k * bits / 8] and scales [n, k/32] (float32), [n, 2 k/32] with
    least values.
    """
    x = x if x.strides[1] == x.itemsize else np.ascontiguousarray(x)
    fits = out.strides[1] == out.itemsize
    y = out if fits else np.empty(out.shape, x.dtype)
    by_group = scales.reshape(len(scales), -1, 2) if grouping.has_least else scales
    _multiply(x, codes, by_group, y)
    if not fits:
        out[...] = y


@compiled()
def _multiply(x: Array, codes: Array, scales: Array, y: Array) -> None:
    (t, n), groups = y.shape, scales.shape[1]
    numbers = _room(t * groups * WORDS_A_GROUP, np.int32).reshape(t, groups * WORDS_A_GROUP)
    factors, starts = np.empty((t, groups), np.float32), np.empty((t, groups), np.int32)
    for r in range(t):
        _round_row(x, r, numbers, factors, starts, codes, scales)
    of_band = _room(scales.size // n * BAND, np.float32)
    width = LANES if t <= FEW else BAND
    turned = _room(groups * GROUP * BAND if t > FEW else 0, np.int8)
    whole = n - n % width
    for i in range(0, whole, width):
        _multiply_band(codes, scales, i, (numbers, factors, starts), of_band, turned, y, i)
    if whole < n:
        rest = np.zeros((width, codes.shape[1]), codes.dtype)
        of_rest = np.zeros((width,) + scales.shape[1:], scales.dtype)
        rest[: n - whole], of_rest[: n - whole] = codes[whole:], scales[whole:]
        room = np.empty((t, width), y.dtype)
        _multiply_band(rest, of_rest, 0, (numbers, factors, starts), of_band, turned, room, 0)
        y[:, whole:] = room[:, : n - whole]


@compiled(inline=True)
def _multiply_band(
    codes: Array, scales: Array, i: int, x: tuple[Array, Array, Array], of_band: Array, turned: Array, y: Array, at: int
) -> None:
    """y[r, at + a] of all rows r of x and the rows i + a of w, a band of them."""
    t = x[0].shape[0]
    if t <= FEW:
        _scales_of_lanes(scales, i, of_band)
        if t == 2:
            _two_straight(codes, scales, i, x[0], x[1], x[2], 0, of_band, y, at)
        else:
            _one_straight(codes, scales, i, x[0], x[1], x[2], 0, of_band, y, at)
        return
    _scales_of_band(scales, i, of_band)
    _turn_band(codes, scales, i, turned)
    fours = t - t % 4
    for r in range(0, fours, 4):
        _four_turned(turned, scales, 0, x[0], x[1], x[2], r, of_band, y, at)
    if t - fours >= 2:
        _two_turned(turned, scales, 0, x[0], x[1], x[2], fours, of_band, y, at)
    if t % 2:
        _one_turned(turned, scales, 0, x[0], x[1], x[2], t - 1, of_band, y, at)


@compiled(inline=True)
def _room(count: int, dtype: Any) -> Array:
    """[count], beginning where a cache line does."""
    memory = np.empty(count + LINE_BYTES, dtype)
    start = -memory.ctypes.data % LINE_BYTES // memory.itemsize
    return memory[start : start + count]


class _Opened:
    """The arguments of an intrinsic's call, arrays as what knows their data, shape and strides; and of what kind the
    weights are whose codes and scales are among them.
    """

    def __init__(self, context: Any, builder: Value, signature: Any, arguments: Any, codes: int, scales: int) -> None:
        self.values = [
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        ]
        self.bits = 8 if signature.args[codes].dtype == types.int8 else 4
        self.has_least = signature.args[scales].ndim == 3
        self.groups = cgutils.unpack_tuple(builder, self.values[scales].shape, signature.args[scales].ndim)[1]

    @property
    def offset(self) -> int:
        """What codes are stored with as numbers of 0 to 255, beyond what they stand for."""
        return 0 if self.has_least else 1 << self.bits - 1

    @property
    def floats(self) -> int:
        """Of a group's scales."""
        return 2 if self.has_least else 1


@intrinsic
def _round_row(
    typing_context: Any, x: Any, r: Any, numbers: Any, factors: Any, starts: Any, codes: Any, scales: Any
) -> Any:
    """Round row r of x: `factors` becomes s_x, `starts` what a group's sum begins with, or, as the bits of a float,
    what least values are multiplied by.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        opened = _Opened(context, builder, signature, arguments, 5, 6)
        x, r, numbers, factors, starts, _, _ = opened.values
        pointers = [row_pointer(builder, array, r) for array in (x, numbers, factors, starts)]
        with cgutils.for_range(builder, opened.groups) as loop:
            _round_group(builder, opened, loop.index, *pointers)
        return context.get_dummy_value()

    return types.void(x, types.intp, numbers, factors, starts, codes, scales), generate


def _round_group(
    builder: Value, opened: _Opened, group: Value, x: Value, numbers: Value, factors: Value, starts: Value
) -> None:
    values = load(builder, x, builder.mul(group, group.type(GROUP)), FLOAT, GROUP)
    kinds = ir.VectorType(WORD, GROUP)
    bits = builder.bitcast(values, kinds)
    sizes = builder.and_(bits, ir.Constant(kinds, [0x7FFFFFFF] * GROUP))  # in order as whole numbers, NaN the largest
    largest = builder.bitcast(_reduced(builder, "smax", sizes), FLOAT)
    scale = builder.fdiv(largest, FLOAT(127.0))
    is_finite = builder.fcmp_ordered("<", scale, FLOAT(float("inf")))
    is_usable = builder.and_(is_finite, builder.fcmp_ordered(">=", scale, FLOAT(float(np.finfo(np.float32).tiny))))
    inverse = builder.select(is_usable, builder.fdiv(FLOAT(1.0), scale), FLOAT(0.0))
    kept = builder.select(is_usable, WORD(-1), WORD(0))
    usable = builder.bitcast(builder.and_(bits, splat(builder, kept, GROUP)), values.type)
    function = ir.FunctionType(values.type, [values.type])
    rint = cgutils.get_or_insert_function(builder.module, function, f"llvm.rint.v{GROUP}f32")
    rounded = builder.call(rint, [builder.fmul(usable, splat(builder, inverse, GROUP))])
    whole = builder.fptosi(rounded, kinds)
    put(builder, stored_numbers(builder, whole), numbers, builder.mul(group, group.type(WORDS_A_GROUP)))
    small = builder.select(is_finite, FLOAT(0.0), FLOAT(float("nan")))
    factor = builder.select(is_usable, scale, small)
    builder.store(factor, builder.gep(factors, [group]))
    total = _reduced(builder, "add", whole)
    if opened.has_least:
        start = builder.bitcast(builder.fmul(factor, builder.sitofp(total, FLOAT)), WORD)
    else:
        start = builder.mul(total, WORD(-opened.offset))
    builder.store(start, builder.gep(starts, [group]))


def _reduced(builder: Value, operation: str, numbers: Value) -> Value:
    name = f"llvm.vector.reduce.{operation}.v{numbers.type.count}i32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WORD, [numbers.type]), name)
    return builder.call(function, [numbers])


def _scales_into(vectors: int) -> Any:
    """A kernel's call `f(scales, i, out)`: out[j * rows + a] is number j of row i + a of scales."""

    @intrinsic
    def turn(typing_context: Any, scales: Any, i: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            opened = _Opened(context, builder, signature, arguments, 0, 0)
            scales, i, out = opened.values
            rows = _rows(builder, scales, i, vectors * LANES)
            count = builder.mul(opened.groups, i.type(opened.floats))
            whole = builder.and_(count, i.type(-4))
            with cgutils.for_range_slice(builder, i.type(0), whole, i.type(4), i.type) as (j, _):
                for vector, some in enumerate(_lanes(rows)):
                    for place, words in enumerate(transposed(builder, some, builder.mul(j, i.type(4)))):
                        at = builder.mul(builder.add(j, i.type(place)), i.type(vectors * LANES))
                        at = builder.add(at, i.type(vector * LANES))
                        put(builder, builder.bitcast(words, FLOATS), out.data, at)
            with cgutils.for_range_slice(builder, whole, count, i.type(1), i.type) as (j, _):
                for a, row in enumerate(rows):
                    number = builder.load(builder.gep(builder.bitcast(row, FLOAT.as_pointer()), [j]))
                    at = builder.add(builder.mul(j, i.type(vectors * LANES)), i.type(a))
                    builder.store(number, builder.gep(out.data, [at]))
            return context.get_dummy_value()

        return types.void(scales, types.intp, out), generate

    return turn


_scales_of_lanes, _scales_of_band = _scales_into(1), _scales_into(VECTORS)


@intrinsic
def _turn_band(typing_context: Any, codes: Any, scales: Any, i: Any, turned: Any) -> Any:
    """turned [k/32, vectors, places, bytes]: the codes of a band of rows from i on, as numbers of 0 to 255."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        opened = _Opened(context, builder, signature, arguments, 0, 1)
        codes, scales, i, turned = opened.values
        rows = _rows(builder, codes, i, BAND)
        ahead = _rows(builder, codes, builder.add(i, i.type(BAND)), 1)[0]
        with cgutils.for_range(builder, opened.groups) as loop:
            _ask_for_group(builder, ahead, loop.index, BAND * GROUP * opened.bits // 8)
            for vector, some in enumerate(_lanes(rows)):
                first = builder.mul(loop.index, i.type(GROUP * BAND))
                for place, numbers in enumerate(_numbers(builder, opened, some, loop.index)):
                    at = builder.add(first, i.type((vector * PLACES + place) * BYTES.count))
                    builder.store(
                        numbers, builder.bitcast(builder.gep(turned.data, [at]), BYTES.as_pointer()), align=VECTOR_BYTES
                    )
        return context.get_dummy_value()

    return types.void(codes, scales, types.intp, turned), generate


def _products(of_x: int, *, straight: bool) -> Any:
    """A kernel's call `f(codes, scales, i, numbers, factors, starts, r, of_band, y, at)`: y[r + c, at + a] for c < of_x
    and the rows i + a of w: as many as lanes when `straight`; else a band, whose codes are `turned` ones.
    """

    @intrinsic
    def products(
        typing_context: Any,
        codes: Any,
        scales: Any,
        i: Any,
        numbers: Any,
        factors: Any,
        starts: Any,
        r: Any,
        of_band: Any,
        y: Any,
        at: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            opened = _Opened(context, builder, signature, arguments, 0, 1)
            codes, scales, i, *of_x_rows, r, of_band, y, at = opened.values
            x = [[row_pointer(builder, array, builder.add(r, r.type(c))) for array in of_x_rows] for c in range(of_x)]
            w = _Straight(builder, opened, codes, scales, i) if straight else _Turned(builder, opened, codes)
            for c, totals in enumerate(_totals(builder, opened, w, x, of_band)):
                target = row_pointer(builder, y, builder.add(r, r.type(c)))
                for vector, total in enumerate(totals):
                    put(builder, builder.load(total), target, builder.add(at, at.type(vector * LANES)))
            return context.get_dummy_value()

        arguments = (codes, scales, types.intp, numbers, factors, starts, types.intp, of_band, y, types.intp)
        return types.void(*arguments), generate

    return products


def _totals(
    builder: Value, opened: _Opened, w: _Straight | _Turned, x: list[list[Value]], of_band: Value
) -> list[list[Value]]:
    """Of each row of x, and each vector of rows of w: where the sum of all groups' terms stands."""
    zeros = ir.Constant(FLOATS, [0.0] * LANES)
    totals = [[cgutils.alloca_once_value(builder, zeros) for _ in range(w.vectors)] for _ in x]
    with cgutils.for_range(builder, opened.groups) as loop:
        group = loop.index
        factors_of_w = _factors_of_w(builder, opened, of_band, group, w.vectors)
        for of_row, sums, pointers in zip(totals, w.sums(group, x), x, strict=True):
            for total, row_sum, factors in zip(of_row, sums, factors_of_w, strict=True):
                _add_term(builder, total, row_sum, factors, pointers, group)
    return totals


class _Straight:
    """Rows of w as they are stored."""

    vectors = 1

    def __init__(self, builder: Value, opened: _Opened, codes: Value, scales: Value, i: Value) -> None:
        self.builder, self.opened = builder, opened
        self.rows = _rows(builder, codes, i, LANES)
        next_band = builder.add(i, i.type(LANES))
        self.ahead, self.scales_ahead = (_rows(builder, array, next_band, 1)[0] for array in (codes, scales))

    def sums(self, group: Value, x: list[list[Value]]) -> list[list[Value]]:
        """Of each row of x, with all lanes: the sums of a group."""
        builder, opened = self.builder, self.opened
        _ask_for_group(builder, self.ahead, group, LANES * GROUP * opened.bits // 8)
        _ask_for_group(builder, self.scales_ahead, group, LANES * 4 * opened.floats)
        w = _numbers(builder, opened, self.rows, group)
        found = []
        for row in x:
            # two sums by turns: an instruction's result can be used only some cycles later
            parts = [_start(builder, opened, row, group), ir.Constant(WORDS, [0] * LANES)]
            for place, numbers in enumerate(w):
                words = words_of_x(builder, row[0], _place(builder, group, place))
                parts[place % 2] = add_products(builder, parts[place % 2], numbers, words)
            found.append([builder.add(*parts)])
        return found


class _Turned:
    """A band of rows of w in the order that `_turn_band` made."""

    vectors = VECTORS

    def __init__(self, builder: Value, opened: _Opened, turned: Value) -> None:
        self.builder, self.opened = builder, opened
        self.numbers = builder.bitcast(turned.data, BYTES.as_pointer())

    def sums(self, group: Value, x: list[list[Value]]) -> list[list[Value]]:
        """Of each row of x, with all lanes of each vector: the sums of a group."""
        builder = self.builder
        first = builder.mul(group, group.type(VECTORS * PLACES))
        found = [[_start(builder, self.opened, row, group)] * VECTORS for row in x]
        for place in range(PLACES):
            w = [
                builder.load(
                    builder.gep(self.numbers, [builder.add(first, group.type(v * PLACES + place))]), align=VECTOR_BYTES
                )
                for v in range(VECTORS)
            ]
            for row, sums in zip(x, found, strict=True):
                words = words_of_x(builder, row[0], _place(builder, group, place))
                sums[:] = [add_products(builder, part, numbers, words) for part, numbers in zip(sums, w, strict=True)]
        return found


_one_straight, _two_straight = (_products(of_x, straight=True) for of_x in (1, 2))
_one_turned, _two_turned, _four_turned = (_products(of_x, straight=False) for of_x in (1, 2, 4))


def _numbers(builder: Value, opened: _Opened, rows: list[Value], group: Value) -> list[Value]:
    """Of a group of so many rows as there are lanes, for each of its PLACES: bytes of 0 to 255, four of each row."""
    first = builder.mul(group, group.type(GROUP * opened.bits // 8))
    if opened.bits == 8:
        words = [word for half in (0, 16) for word in transposed(builder, rows, builder.add(first, first.type(half)))]
        signs = ir.Constant(BYTES, [0x80] * BYTES.count)
        return [builder.xor(builder.bitcast(word, BYTES), signs) for word in words]
    pairs = [builder.bitcast(word, BYTES) for word in transposed(builder, rows, first)]
    low = [builder.and_(pair, ir.Constant(BYTES, [15] * BYTES.count)) for pair in pairs]
    return low + [builder.lshr(pair, ir.Constant(BYTES, [4] * BYTES.count)) for pair in pairs]


def _start(builder: Value, opened: _Opened, row: list[Value], group: Value) -> Value:
    """What the sums of a group begin with: the codes' offset times the sum of x, taken off."""
    if opened.has_least:
        return ir.Constant(WORDS, [0] * LANES)
    return splat(builder, builder.load(builder.gep(row[2], [group])), LANES)


def _place(builder: Value, group: Value, place: int) -> Value:
    return builder.add(builder.mul(group, group.type(PLACES)), group.type(place))


def _factors_of_w(builder: Value, opened: _Opened, of_band: Value, group: Value, vectors: int) -> list[list[Value]]:
    """Of each vector: the scales of a group, and the least values behind them where there are some."""
    first = builder.mul(group, group.type(opened.floats * vectors * LANES))
    return [
        [
            load(builder, of_band.data, builder.add(first, first.type((f * vectors + v) * LANES)), FLOAT, LANES)
            for f in range(opened.floats)
        ]
        for v in range(vectors)
    ]


def _add_term(builder: Value, total: Value, sums: Value, factors: list[Value], row: list[Value], group: Value) -> None:
    """total += sums * (s * s_x), and before it is added + m * (s_x * sum of q)."""
    factor_of_x = splat(builder, builder.load(builder.gep(row[1], [group])), LANES)
    term = builder.fmul(builder.sitofp(sums, FLOATS), builder.fmul(factors[0], factor_of_x))
    if len(factors) > 1:
        of_least = builder.bitcast(builder.load(builder.gep(row[2], [group])), FLOAT)
        term = builder.fadd(term, builder.fmul(factors[1], splat(builder, of_least, LANES)))
    builder.store(builder.fadd(builder.load(total), term), total)


def _rows(builder: Value, array: Value, i: Value, count: int) -> list[Value]:
    """Where rows i, i + 1, ... begin, as pointers to bytes."""
    return [builder.bitcast(_row(builder, array, builder.add(i, i.type(a))), BYTE.as_pointer()) for a in range(count)]


def _row(builder: Value, array: Value, i: Value) -> Value:
    """Of array[i], an array of two or three dims."""
    stride = cgutils.unpack_tuple(builder, array.strides)[0]
    return cgutils.pointer_add(builder, array.data, builder.mul(i, stride))


def _lanes(rows: list[Value]) -> list[list[Value]]:
    return [rows[first : first + LANES] for first in range(0, len(rows), LANES)]


def _ask_for_group(builder: Value, pointer: Value, group: Value, nbytes: int) -> None:
    """Have what a group of the rows to come takes brought nearer: they lie behind one another, as a rule.

    To the first-level cache: of 28 MB that is 1.3 times as fast as to the second-level one (Emerald Rapids).
    """
    first = builder.mul(group, group.type(nbytes))
    for line in range(0, nbytes, LINE_BYTES):
        ask_for(builder, builder.gep(pointer, [builder.add(first, first.type(line))]), FIRST_LEVEL_CACHE)
