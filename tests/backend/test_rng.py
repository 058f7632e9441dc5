from __future__ import annotations

import math

import numpy as np
import pytest

from mpitp.backend import rng as streams
from mpitp.backend.arrays import from_host, to_host
from tests.ops.checks import assert_like

KEY = streams.stream_key(1, "test")

# Random123's kat_vectors, philox 4x32, 10 rounds: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
@pytest.mark.parametrize("copies", [1, 3])
def test_known_answers(xp, counter, key, expected, copies):
    words = [from_host(np.full(copies, int(w, 16), np.uint32), xp) for w in counter.split()]
    result = streams.philox4x32(tuple(words), tuple(int(w, 16) for w in key.split()))
    for got, word in zip(result, expected.split(), strict=True):
        assert_like(got, np.uint32, xp)
        np.testing.assert_array_equal(to_host(got), np.full(copies, int(word, 16), np.uint32))


def test_known_answers_among_others(xp):
    """All three counters in one call, under each key in turn."""
    counters = [np.array([int(c.split()[i], 16) for c, _, _ in KNOWN], np.uint32) for i in range(4)]
    for place, (_, key, expected) in enumerate(KNOWN):
        result = streams.philox4x32(tuple(from_host(c, xp) for c in counters), tuple(int(w, 16) for w in key.split()))
        assert [f"{int(to_host(w)[place]):08x}" for w in result] == expected.split()


def test_stream_keys_are_stable_and_differ():
    assert streams.stream_key(1, "init/wte") == streams.stream_key(1, "init/wte")
    keys = {streams.stream_key(seed, name) for seed in (0, 1, -1, 2**40) for name in ("a", "b", "1/a", "")}
    assert len(keys) == 16
    assert all(0 <= word < 2**32 for key in keys for word in key)
    assert streams.stream_key(1, "init") == (741299655, 270331091)  # files made before must stay readable


def test_normals_are_the_sum_of_eight_halves_of_a_block(xp):
    index = np.array([0, 1, 2**32 - 1, 2**32, 2**40 + 7], np.uint64)
    low, high = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    words = streams.philox4x32((low, high, np.zeros(5, np.uint32), np.zeros(5, np.uint32)), KEY)
    total = sum(int(w) % 65536 + int(w) // 65536 for w in np.array(words)[:, 3])
    got = streams.normal_at(from_host(index, xp), KEY, xp)
    assert_like(got, np.float64, xp)
    assert to_host(got)[3] == pytest.approx((total - 8 * 65535 / 2) / math.sqrt(8 * (65536**2 - 1) / 12), rel=1e-15)


def test_normals_look_normal():
    z = streams.normal_at(np.arange(400_000, dtype=np.uint64), KEY, np)
    n = len(z)
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((z**4).mean() - (3 - 1.2 / 8)) < 4 * math.sqrt(96 / n)  # Irwin-Hall of 8: excess kurtosis -1.2/8
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 4 / math.sqrt(n)
    for bound, share in ((1, 0.6827), (2, 0.9545)):
        assert abs((np.abs(z) < bound).mean() - share) < 0.01
    other = streams.normal_at(np.arange(400_000, dtype=np.uint64), streams.stream_key(1, "other"), np)
    assert abs(np.corrcoef(z, other)[0, 1]) < 4 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "dim"), [((7, 5), 0), ((7, 5), 1), ((9,), 0), ((3, 4, 5), 1), ((2, 0, 3), 0)])
def test_normal_rows_are_slices_of_the_global_tensor(xp, monkeypatch, dtype, shape, dim):
    whole = streams.normal_box(shape, tuple(map(range, shape)), KEY, dtype, xp)
    assert_like(whole, dtype, xp)
    flat = streams.normal_at(from_host(np.arange(math.prod(shape), dtype=np.uint64), xp), KEY, xp)
    np.testing.assert_array_equal(to_host(whole), to_host(flat).astype(dtype).reshape(shape))
    monkeypatch.setattr(streams, "BLOCK_ELEMENTS", 4)
    for rows in (range(0, 2), range(1, shape[dim]), range(1, 1)):
        box = tuple(rows if each == dim else range(size) for each, size in enumerate(shape))
        part = to_host(streams.normal_box(shape, box, KEY, dtype, xp))
        np.testing.assert_array_equal(part, np.take(to_host(whole), list(rows), axis=dim))


def test_boxes_cut_in_several_dims(xp, monkeypatch):
    whole = to_host(streams.normal_box((4, 5, 6), (range(4), range(5), range(6)), KEY, np.float64, xp))
    monkeypatch.setattr(streams, "BLOCK_ELEMENTS", 4)
    for box in [
        (range(1, 3), range(2, 5), range(6)),
        (range(4), range(0, 2), range(3, 6)),
        (range(0), range(5), range(6)),
    ]:
        part = to_host(streams.normal_box((4, 5, 6), box, KEY, np.float64, xp))
        np.testing.assert_array_equal(part, whole[np.ix_(*box)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dropout_masks_are_slices_of_the_global_mask(xp, dtype):
    whole = streams.dropout_mask(0.3, KEY, 5, range(20), range(50), dtype, xp)
    assert_like(whole, dtype, xp)
    whole = to_host(whole)
    assert set(np.unique(whole)) == {dtype(0), dtype(1 / 0.7)}
    for rows, cols in [
        (range(3, 9), range(50)),
        (range(20), range(7, 9)),
        (range(1, 2), range(13, 47)),
        (range(0), range(5)),
    ]:
        part = streams.dropout_mask(0.3, KEY, 5, rows, cols, dtype, xp)
        np.testing.assert_array_equal(to_host(part), whole[rows.start : rows.stop, cols.start : cols.stop])
    columns = np.array([40, 3, 4, 49, 0])
    part = streams.dropout_mask(0.3, KEY, 5, range(2, 8), columns, dtype, xp)
    np.testing.assert_array_equal(to_host(part), whole[2:8, columns])
    assert streams.dropout_mask(0.3, KEY, 5, range(4), range(6, 6), dtype, xp).shape == (4, 0)
    other = to_host(streams.dropout_mask(0.3, KEY, 6, range(20), range(50), dtype, xp))
    assert (other != whole).any()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share(rate):
    mask = streams.dropout_mask(rate, KEY, 2**33 + 1, range(1000), range(256), np.float64, np)
    spread = math.sqrt(rate * (1 - rate) / mask.size)
    assert abs((mask == 0).mean() - rate) < 4 * spread + 2**-17
    for axis in (0, 1):  # neighbours are independent
        kept = (mask > 0).astype(float) - (1 - rate)
        a, b = np.take(kept, range(kept.shape[axis] - 1), axis), np.take(kept, range(1, kept.shape[axis]), axis)
        assert abs((a * b).mean()) < 4 * rate * (1 - rate) / math.sqrt(a.size)


def test_dropout_of_nothing_keeps_all(xp):
    np.testing.assert_array_equal(to_host(streams.dropout_mask(0.0, KEY, 0, range(3), range(9), np.float32, xp)), 1)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_permutation_is_one(n):
    places = streams.permute_index(np.arange(n), n, KEY)
    np.testing.assert_array_equal(np.sort(places), np.arange(n))
    assert places.dtype == np.int64
    assert [streams.permute_index(i, n, KEY) for i in range(0, n, max(n // 5, 1))] == places[:: max(n // 5, 1)].tolist()
    assert isinstance(streams.permute_index(0, n, KEY), int)
    if n > 16:
        assert (places != np.arange(n)).mean() > 0.9
        assert (places != streams.permute_index(np.arange(n), n, streams.stream_key(2, "test"))).mean() > 0.9


def test_permutation_spreads_evenly():
    """Over many keys, where 0 goes is uniform."""
    counts = np.bincount([streams.permute_index(0, 5, (k, 1)) for k in range(200)], minlength=5)
    assert ((counts - 40) ** 2 / 40).sum() < 18.5  # chi squared, 4 degrees of freedom, p = 0.001


def test_permutation_of_a_huge_range():
    n = 10**12 + 39
    places = streams.permute_index(np.array([0, 1, n - 1]), n, KEY)
    assert len(set(places.tolist())) == 3 and (places < n).all() and (places >= 0).all()
