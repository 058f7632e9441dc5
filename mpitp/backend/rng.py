"""Random numbers by counter: any element of a stream can be drawn by itself, so every layout draws the same ones.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter of four
32-bit words and a key of two into four random words. The key names the stream (`stream_key`), the counter the global
element.

- `normal_box`: initial weights. A normal is made of integers only, so that the bits are the same on every device.
- `dropout_mask`: keep masks, by (sample, row, column) of the global activation.
- `permute_index`: the order of the training data, without a table.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, from_host

Key = tuple[int, int]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
LOW = np.uint64(WORD)
HIGH_SHIFT = np.uint64(32)

LANES = 8  # 16-bit lanes of one Philox block
LANE_VALUES = 1 << 16
BLOCK_ELEMENTS = 1 << 14  # counters at a time: their words stay in the cache

# the sum of 8 uniform lanes 0 .. 65535: mean 8 * 65535 / 2, variance 8 * (65536^2 - 1) / 12
NORMAL_MEAN = np.int64(LANES * (LANE_VALUES - 1) // 2)
NORMAL_SCALE = np.float64(1.0 / math.sqrt(LANES * (LANE_VALUES**2 - 1) / 12))


def stream_key(seed: int, name: str) -> Key:
    """The key of the stream `name` under `seed`: the same on every machine and Python version."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(counter: tuple[Array, Array, Array, Array], key: Key) -> tuple[Array, Array, Array, Array]:
    """Four random uint32 arrays from four counter words (uint32 arrays that broadcast) and the two words of the key."""
    words = philox_words(tuple(word.astype(np.uint64) for word in counter), key)
    return tuple(word.astype(np.uint32) for word in words)


def philox_words(counter: tuple[Array, ...], key: Key) -> tuple[Array, ...]:
    """The same on 32-bit words that are held in uint64 arrays, where their products fit."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (product1 >> HIGH_SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (product0 >> HIGH_SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & LOW, product0 & LOW
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def normal_at(index: Array, key: Key, xp: Any) -> Array:
    """float64, nearly standard normal, one for each index (uint64); |z| < 4.9.

    Irwin-Hall: the sum of the eight 16-bit halves of one block, centred and scaled to variance 1. Integer sums and one
    product: the same bits on any device.
    """
    total = xp.zeros(index.shape, dtype=np.uint64)
    for word in _words_at(index, key):
        total += (word & np.uint64(0xFFFF)) + (word >> np.uint64(16))
    return (total.astype(np.int64) - NORMAL_MEAN).astype(np.float64) * NORMAL_SCALE


def normal_box(shape: tuple[int, ...], box: tuple[range, ...], key: Key, dtype: Any, xp: Any) -> Array:
    """The box of the global tensor of `shape` whose element i (in C order) is normal_at(i); one range a dim."""
    local = tuple(map(len, box))
    inner = max((dim for dim in range(len(shape)) if local[dim] < shape[dim]), default=0)  # whole from here on
    depth = math.prod(shape[inner + 1 :])
    width = local[inner] * depth if local else 1  # neighbours in the global tensor
    result = xp.empty((math.prod(local[:inner]), width), dtype=dtype)
    for outer, place in enumerate(itertools.product(*box[:inner])):
        first = _flat_index(shape, (*place, box[inner].start)) * depth if local else 0
        for start in range(0, width, BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, width)
            index = xp.arange(first + start, first + stop, dtype=np.uint64)
            result[outer, start:stop] = normal_at(index, key, xp).astype(dtype)
    return result.reshape(local)


def _flat_index(shape: tuple[int, ...], place: tuple[int, ...]) -> int:
    """The number, in C order, of a place in the leading dims of a tensor."""
    number = 0
    for size, each in zip(shape, place, strict=False):
        number = number * size + each
    return number


def dropout_mask(
    rate: float, key: Key, sample_index: int, rows: range, cols: range | np.ndarray, dtype: Any, xp: Any
) -> Array:
    """Keep mask [len(rows), len(cols)]: 0 with probability `rate`, else 1 / (1 - rate).

    Element (row, col) of sample `sample_index` is decided by the global indices alone. `rate` is rounded to a multiple
    of 2^-16. `cols` may be an array of global column indices (on the host).
    """
    blocks, pick = _lane_blocks(cols)
    threshold = np.uint64(round(rate * LANE_VALUES))
    row = xp.arange(rows.start, rows.stop, dtype=np.uint64)[:, None]
    col = from_host(blocks.astype(np.uint64), xp)[None, :]
    counter = (col + row * np.uint64(0), row + col * np.uint64(0), *_split(sample_index))
    keep = xp.empty((len(rows), len(blocks), LANES), dtype=np.bool_)
    for i, word in enumerate(philox_words(counter, key)):
        keep[:, :, 2 * i] = (word & np.uint64(0xFFFF)) >= threshold
        keep[:, :, 2 * i + 1] = (word >> np.uint64(16)) >= threshold
    keep = keep.reshape(len(rows), len(blocks) * LANES)
    keep = keep[:, pick] if isinstance(pick, slice) else keep[:, from_host(pick, xp)]
    scale = np.dtype(dtype).type(1.0 / (1.0 - rate))
    return keep.astype(dtype) * scale


def permute_index(i: int | np.ndarray, n: int, key: Key) -> int | np.ndarray:
    """Where a random permutation of range(n) sends i (an integer or an array of them), without a table.

    A Feistel network permutes the smallest range of 4^k that holds n; a result outside range(n) is sent on until it
    falls inside (cycle walking), which keeps the map a permutation.
    """
    half = max(2, (max(n - 1, 1).bit_length() + 1) // 2)
    value = np.atleast_1d(np.asarray(i)).astype(np.uint64)
    assert np.all(value < n), "permute_index permutes range(n)"
    value = _feistel(value, half, key)
    while (outside := value >= n).any():
        value[outside] = _feistel(value[outside], half, key)
    return int(value[0]) if np.ndim(i) == 0 else value.astype(np.int64).reshape(np.shape(i))


def _feistel(value: np.ndarray, half: int, key: Key, rounds: int = 8) -> np.ndarray:
    """A permutation of range(4^half)."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = value >> shift, value & mask
    for step in range(rounds):
        counter = (right, np.full_like(right, step), np.zeros_like(right), np.zeros_like(right))
        left, right = right, left ^ (philox_words(counter, key)[0] & mask)
    return (left << shift) | right


def words_at(index: np.ndarray, key: Key) -> tuple[np.ndarray, ...]:
    """Four random uint32 arrays, one number of each for each index (uint64)."""
    return tuple(word.astype(np.uint32) for word in _words_at(index, key))


def _words_at(index: Array, key: Key) -> tuple[Array, ...]:
    return philox_words((index & LOW, index >> HIGH_SHIFT, np.uint64(0), np.uint64(0)), key)


def _split(value: int) -> tuple[np.uint64, np.uint64]:
    return np.uint64(value & WORD), np.uint64(value >> 32)


def _lane_blocks(cols: range | np.ndarray) -> tuple[np.ndarray, slice | np.ndarray]:
    """The lane blocks that hold the columns, and where the columns lie in these blocks' lanes."""
    if isinstance(cols, range):
        first = cols.start // LANES
        blocks = np.arange(first, -(-cols.stop // LANES))
        return blocks, slice(cols.start - first * LANES, cols.stop - first * LANES)
    blocks, place = np.unique(np.asarray(cols) // LANES, return_inverse=True)
    return blocks, place * LANES + np.asarray(cols) % LANES
