"""CRC-32 of the chunks of a file from the pieces that many ranks write, so that nothing has to be read back.

CRC-32 is linear. With `raw` the remainder that begins at zero and isn't inverted at the end, a chunk M of L bytes made
of pieces m_i, each followed by a_i bytes of the chunk, has

    raw(M) = xor over i of raw(m_i) * x^(8 a_i)  mod P
    crc32(M) = raw(M)  xor  0xffffffff * x^(8 L)  xor  0xffffffff

(Williams 1993, "A painless guide to CRC error detection algorithms"; zlib's crc32_combine does the same for two). A
rank sums its own pieces, all ranks' sums are joined by xor, and the result is what `zlib.crc32` says of a whole chunk.
Polynomials are 32-bit integers, the coefficient of x^0 in the highest bit, as in zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future
from functools import cache

import numpy as np

POLYNOMIAL = np.uint32(0xEDB88320)
ONES = 0xFFFFFFFF
LARGE_BYTES = 1 << 18  # pieces worth handing to another thread
_LOW_BITS = 13  # a power x^(8 n) is looked up by the low and the high bits of n

Sums = dict[int, int]  # chunk: the pieces' share of its raw remainder


class ChunkSums:
    """Gathers the pieces of one file that this rank writes.

    `pool`: sums large pieces in its threads, while the caller writes them; they must not change until `sums()`.
    """

    def __init__(self, size: int, chunk_bytes: int, pool: Executor | None = None) -> None:
        """`size`: of the whole file; every chunk but the last has `chunk_bytes`."""
        self.size, self.chunk_bytes, self._pool = size, chunk_bytes, pool
        self._pieces: list[tuple[int, int]] = []  # where the piece ends in the file, its raw remainder
        self._under_way: list[tuple[int, Future[int]]] = []

    def add(self, offset: int, data: memoryview) -> None:
        """Bytes that lie at `offset` of the file."""
        while len(data):
            count = min(len(data), self.chunk_bytes - offset % self.chunk_bytes)
            if self._pool is None or count < LARGE_BYTES:
                self._pieces.append((offset + count, _raw(data[:count])))
            else:
                self._under_way.append((offset + count, self._pool.submit(_raw, data[:count])))
            data, offset = data[count:], offset + count

    def add_rows(self, offset: int, stride_bytes: int, data: memoryview, row_bytes: int) -> None:
        """Rows of `row_bytes` that lie `stride_bytes` apart from `offset` on."""
        starts = range(0, len(data), row_bytes)
        ends = range(offset + row_bytes, offset + row_bytes + stride_bytes * len(starts), stride_bytes)
        if offset // self.chunk_bytes == (ends[-1] - 1) // self.chunk_bytes:
            self._pieces += zip(ends, [_raw(data[start : start + row_bytes]) for start in starts], strict=True)
            return
        for start, end in zip(starts, ends, strict=True):
            self.add(end - row_bytes, data[start : start + row_bytes])

    def sums(self) -> Sums:
        """This rank's share of every chunk that it has pieces of."""
        self._pieces += [(end, future.result()) for end, future in self._under_way]
        self._under_way = []
        if not self._pieces:
            return {}
        ends, raws = np.array(self._pieces, np.int64).T
        chunks = (ends - 1) // self.chunk_bytes
        after = np.minimum((chunks + 1) * self.chunk_bytes, self.size) - ends
        shares = multiply(raws.astype(np.uint32), power(after))
        return {int(chunk): int(np.bitwise_xor.reduce(shares[chunks == chunk])) for chunk in np.unique(chunks)}


def _raw(data: memoryview) -> int:
    return zlib.crc32(data, ONES) ^ ONES


def join(shares: Iterable[Mapping[int, int]], size: int, chunk_bytes: int) -> list[int]:
    """The CRC-32 of every chunk of a file of `size` bytes, from all ranks' shares."""
    starts = range(0, max(size, 1), chunk_bytes)
    lengths = np.array([min(chunk_bytes, size - start) for start in starts], np.int64)
    raws = np.zeros(len(lengths), np.uint32)
    for share in shares:
        for chunk, value in share.items():
            raws[chunk] ^= np.uint32(value)
    whole = raws ^ multiply(np.full_like(raws, ONES), power(lengths)) ^ np.uint32(ONES)
    return [int(value) for value in whole]


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise a * b mod P, uint32."""
    product, b = np.zeros_like(b), b.copy()
    for bit in range(31, -1, -1):  # from x^0 on
        product ^= b * ((a >> np.uint32(bit)) & np.uint32(1))
        b = (b >> np.uint32(1)) ^ (POLYNOMIAL * (b & np.uint32(1)))
    return product


def power(n: np.ndarray) -> np.ndarray:
    """x^(8 n) mod P of whole numbers n >= 0 below 2^29."""
    low, high = _tables()
    return multiply(low[n & ((1 << _LOW_BITS) - 1)], high[_checked(n >> _LOW_BITS)])


def _checked(high: np.ndarray) -> np.ndarray:
    assert not len(high) or int(high.max()) < len(_tables()[1]), "a chunk too large for the table of powers"
    return high


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """x^(8 n) for n below 2^13, and x^(8 2^13 n) for n below 2^16."""
    byte = np.array([1 << 23], np.uint32)  # x^8
    low = _powers(byte, _LOW_BITS)
    return low, _powers(multiply(low[-1:], byte), 16)


def _powers(base: np.ndarray, bits: int) -> np.ndarray:
    """base^n for n below 2^bits: each doubling multiplies what is there by the next square."""
    table, square = np.array([1 << 31], np.uint32), base
    for _ in range(bits):
        table = np.concatenate([table, multiply(table, np.broadcast_to(square, table.shape))])
        square = multiply(square, square)
    return table
