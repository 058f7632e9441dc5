"""CRC-32 put together from pieces is the CRC-32 of the whole, whoever holds which piece, in whatever order."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpitp.checkpoint import chunk_sums
from mpitp.checkpoint.chunk_sums import ChunkSums, join, multiply, power

DATA = np.random.default_rng(1).bytes(100_003)


@pytest.mark.parametrize("chunk", [1, 7, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_pieces_in_any_hands_and_order(chunk: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sums, "LARGE_BYTES", 900)
    data = DATA if chunk > 7 else DATA[:500]
    dice = random.Random(chunk + ranks)
    cuts = sorted({0, len(data), *(dice.randrange(len(data)) for _ in range(60))})
    pieces = list(zip(cuts, cuts[1:], strict=False))
    dice.shuffle(pieces)
    with ThreadPoolExecutor(2) as pool:
        hands = [ChunkSums(len(data), chunk, dice.choice([None, pool])) for _ in range(ranks)]
        for start, stop in pieces:
            dice.choice(hands).add(start, memoryview(data)[start:stop])
        found = join([hand.sums() for hand in hands], len(data), chunk)
    assert found == [zlib.crc32(data[start : start + chunk]) for start in range(0, len(data), chunk)]


@pytest.mark.parametrize("at_once", [False, True])
def test_rows_of_a_matrix_cut_by_columns(at_once: bool) -> None:
    matrix = np.frombuffer(DATA[:96_000], np.uint8).reshape(100, 960)
    hands = [ChunkSums(matrix.size, 10_000) for _ in range(3)]
    for hand, columns in zip(hands, (slice(0, 320), slice(320, 321), slice(321, 960)), strict=True):
        for first in range(0, 100, 4) if at_once else ():
            rows = np.ascontiguousarray(matrix[first : first + 4, columns])
            hand.add_rows(first * 960 + columns.start, 960, rows.reshape(-1).data, rows.shape[1])
        for row in () if at_once else range(100):
            hand.add(row * 960 + columns.start, memoryview(matrix[row, columns].copy()))
    assert join([hand.sums() for hand in hands], matrix.size, 10_000) == [
        zlib.crc32(DATA[start : min(start + 10_000, 96_000)]) for start in range(0, 96_000, 10_000)
    ]


def test_what_is_never_written_counts_as_zeros() -> None:
    """A file is made at its full size, so that a gap reads as zeros."""
    hand = ChunkSums(1000, 600)
    hand.add(10, memoryview(b"abc"))
    whole = bytes(10) + b"abc" + bytes(987)
    assert join([hand.sums()], 1000, 600) == [zlib.crc32(whole[:600]), zlib.crc32(whole[600:])]
    assert join([], 0, 64) == [0]


def test_powers_of_x() -> None:
    one, byte = np.array([1 << 31], np.uint32), np.array([1 << 23], np.uint32)
    expected = one
    for n in range(20):
        assert power(np.array([n]))[0] == expected[0]
        expected = multiply(expected, byte)
    large = np.array([8191, 8192, 8193, 1 << 26, (1 << 29) - 2])
    np.testing.assert_array_equal(multiply(power(large), power(np.array([1] * 5))), power(large + 1))
    with pytest.raises(AssertionError):
        power(np.array([1 << 29]))
