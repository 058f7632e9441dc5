r"""Weights in 8 or 4 bits: neighbours along a row share a scale.

    w[i, j] ~ q[i, j] * s[i, j // g]        w [n, k], q whole numbers, s [n, k/g], g numbers a group

8 bits, q from -127 to 127:     s = max |w| / 127              stored as int8 [n, k]
4 bits, q from -8 to 7:         s = w_max / -8                 w_max: the one that is largest in size, with its sign;
                                                               two numbers a byte, uint8 [n, k/2]: byte j of a group
                                                               holds q[j] + 8 (low half) and q[j + g/2] + 8 (high half)

These are the roundings of GGUF's Q8_0 and Q4_0 (groups of 32, scales in float16), so that such tensors are kept bit for
bit. 4 bits may have a least value beside the scale, as in GGUF's Q4_1 and Q4_K:

    w[i, j] ~ c[i, j] * s[i, j // g] + m[i, j // g]            c from 0 to 15, stored as above without the 8;
                                                               s and m in turn: float32 [n, 2 k/g]

There s has 17 bits at most (Q4_K: 11 of a float16 times 6), so that c * s fits a float32 and w is rounded once, in the
sum. A product reads the codes, widens them and multiplies floats; nothing is rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.errors import ConfigError
from mpitp.ops.linear import linear_forward

GROUP_SIZE = 32
BITS = (8, 4)
WIDENED_BYTES = 256 * 1024  # of rows that are widened at a time: the second-level cache
COMPILED_BYTES = 4 * 2**20  # the same where that is compiled: then BLAS's larger products count for more
COMPILED_ROWS = 32  # of x up to here the compiled kernels are faster than widened weights and BLAS
MOST_SCALE = 65504.0  # float16
Multiply = Callable[..., Array]  # (x, codes, scales, grouping, out=...) to y, as `groupwise_forward`


@dataclass(frozen=True, slots=True)
class Grouping:
    """How weights are rounded: `bits` a number, `size` numbers a scale; `has_least`: a least value beside it."""

    bits: int
    size: int = GROUP_SIZE
    has_least: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"weights of {self.bits} bits are not supported; supported: {', '.join(map(str, BITS))}")
        if self.size < 2 or self.size % 2:
            raise ConfigError(
                f"groups of {self.size} weights are not supported: an even number of at least 2 is needed"
            )
        if self.has_least and self.bits != 4:
            raise ConfigError(f"weights of {self.bits} bits with a least value are not supported; those of 4 are")

    @property
    def of_tables(self) -> Grouping:
        """How vocabulary tables are rounded beside matrices that are rounded so: to 8 bits, since every token's
        likelihood hangs on them.
        """
        return Grouping(8, self.size)

    @property
    def group_bytes(self) -> int:
        """Of the codes of one group."""
        return self.size * self.bits // 8

    @property
    def group_floats(self) -> int:
        """How many numbers in `scales` belong to a group: its scale, and its least value where there is one."""
        return 2 if self.has_least else 1

    def groups_in(self, scales: Array) -> int:
        """Of a row, told by its scales."""
        return scales.shape[-1] // self.group_floats

    @property
    def dtype(self) -> np.dtype:
        """Of the stored codes."""
        return np.dtype(np.int8 if self.bits == 8 else np.uint8)


def quantise(w: np.ndarray, grouping: Grouping) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, k * bits / 8] and scales [n, k/g] (float16) of w [n, k], k a multiple of g; with least values
    [n, 2 k/g], float32 of numbers in float16. Raises ConfigError else.
    """
    n, k = w.shape
    if k % grouping.size:
        raise ConfigError(f"rows of {k} weights can't be cut into groups of {grouping.size}")
    groups = np.asarray(w, np.float32).reshape(n, k // grouping.size, grouping.size)
    if grouping.has_least:
        return _quantised_from_least(groups)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0]
    exact = np.abs(largest) / 127 if grouping.bits == 8 else largest / -8
    if not np.isfinite(exact).all() or (np.abs(exact) > MOST_SCALE).any():
        raise ConfigError(f"weights up to {np.abs(largest).max():.3g} are beyond what a scale in float16 can hold")
    scales = exact.astype(np.float16)
    stored = scales.astype(np.float32)
    inverse = np.divide(1, stored, out=np.zeros_like(stored), where=stored != 0)
    scaled = groups * inverse[..., None]
    if grouping.bits == 8:
        codes = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
        return codes.reshape(n, k), scales
    return packed(np.clip(np.rint(scaled) + 8, 0, 15).astype(np.uint8)), scales


def _quantised_from_least(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """s = (max w - min w) / 15 and m = min w of groups [n, k/g, g], each rounded to float16."""
    if not (np.abs(groups) <= MOST_SCALE).all():
        raise ConfigError(f"weights up to {np.abs(groups).max():.3g} are beyond what a scale in float16 can hold")
    pairs = np.stack([(groups.max(axis=2) - groups.min(axis=2)) / 15, groups.min(axis=2)], axis=2)
    pairs = pairs.astype(np.float16).astype(np.float32)
    scale, least = pairs[..., :1], pairs[..., 1:]
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.clip(np.rint((groups - least) * inverse), 0, 15).astype(np.uint8)
    return packed(codes), pairs.reshape(len(groups), -1)


def packed(codes: np.ndarray) -> np.ndarray:
    """Numbers of 0 to 15, uint8 [n, k/g, g], two a byte: [n, k/2]."""
    n, groups, size = codes.shape
    return (codes[:, :, : size // 2] | codes[:, :, size // 2 :] << 4).reshape(n, groups * size // 2)


def widened(codes: Array, scales: Array, grouping: Grouping) -> Array:
    """w [n, k] as float32 of codes and scales; the plain expression of everything here."""
    n, groups = len(scales), grouping.groups_in(scales)
    whole = whole_numbers(codes, groups, grouping)
    of_groups = scales.astype(np.float32).reshape(n, groups, grouping.group_floats)
    whole *= of_groups[..., :1]
    if grouping.has_least:
        whole += of_groups[..., 1:]
    return whole.reshape(n, groups * grouping.size)


def whole_numbers(codes: Array, groups: int, grouping: Grouping) -> Array:
    """[n, k/g, g] as float32: what scales are multiplied by."""
    xp, n = array_module(codes), len(codes)
    if grouping.bits == 8:
        return codes.reshape(n, groups, grouping.size).astype(np.float32)
    pairs = codes.reshape(n, groups, grouping.size // 2)
    whole = xp.concatenate([pairs & 15, pairs >> 4], axis=2).astype(np.float32)
    if not grouping.has_least:
        whole -= 8
    return whole


def groupwise_forward(x: Array, codes: Array, scales: Array, grouping: Grouping, out: Array | None = None) -> Array:
    """y [t, n] of x [t, k]: x @ w.T, float32; written to `out` when given."""
    xp, (t, k), n = array_module(x), x.shape, scales.shape[0]
    y = xp.empty((t, n), x.dtype) if out is None else out
    is_compiled = k > 0 and _is_compiled(x, scales, grouping)
    if is_compiled and 0 < t <= COMPILED_ROWS:
        from mpitp.ops.compiled.groupwise import few_rows

        few_rows(x, codes, scales, grouping, y)
        return y
    for rows in _bands(n, k, COMPILED_BYTES if is_compiled else WIDENED_BYTES):
        w = (_widened_compiled if is_compiled else widened)(codes[rows], scales[rows], grouping)
        linear_forward(x, w.astype(x.dtype, copy=False), out=y[:, rows])
    return y


def groupwise_input_grad(dy: Array, codes: Array, scales: Array, grouping: Grouping, out: Array | None = None) -> Array:
    """dx [t, k] of dy [t, n]: dy @ w; written to `out` when given."""
    xp, k = array_module(dy), grouping.groups_in(scales) * grouping.size
    dx = xp.empty((dy.shape[0], k), dy.dtype) if out is None else out
    dx[...] = 0
    for rows in _bands(scales.shape[0], k):
        dx += dy[:, rows] @ widened(codes[rows], scales[rows], grouping).astype(dy.dtype, copy=False)
    return dx


def _is_compiled(x: Array, scales: Array, grouping: Grouping) -> bool:
    """Whether the compiled kernels take these arrays."""
    is_kind = x.dtype == np.float32 and scales.dtype == np.float32 and grouping.size == GROUP_SIZE
    return is_kind and is_accelerated(array_module(x), x.dtype)


def _widened_compiled(codes: Array, scales: Array, grouping: Grouping) -> Array:
    """As `widened`, to the bit."""
    from mpitp.ops.compiled.groupwise import widen

    w = np.empty((scales.shape[0], grouping.groups_in(scales) * grouping.size), np.float32)
    widen(codes, scales, grouping, w)
    return w


def _bands(n: int, k: int, nbytes: int = WIDENED_BYTES) -> list[slice]:
    """Rows of w that are widened together."""
    step = max(16, nbytes // (4 * max(k, 1)))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]
