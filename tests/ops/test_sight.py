"""What queries see, in tiles: against the plain rule, position by position; and attention through such tiles."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import sight
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward
from mpitp.ops.online_softmax import join_finished
from mpitp.ops.score_change import ScoreChange
from mpitp.ops.sight import CAUSAL, EVERYTHING, Band
from tests.ops.checks import check_gradients

BANDS = [CAUSAL, EVERYTHING, Band(behind=4), Band(behind=0), Band(behind=2, ahead=5), Band(behind=None, ahead=3)]
PLACES = [
    (range(11), range(11)),
    (range(6, 11), range(11)),
    (range(20, 27), range(13)),
    (range(3, 9), range(6, 13)),
    (range(5), range(0)),
]


def seen(band, queries, keys):
    p, j = np.array(queries)[:, None], np.array(keys)[None, :]
    behind = np.inf if band.behind is None else band.behind
    ahead = np.inf if band.ahead is None else band.ahead
    return (j >= p - behind) & (j <= p + ahead)


def small_tiles(monkeypatch, tile, longer):
    for name, size in (("TILE", tile), ("DEVICE_TILE", tile), ("LONG_TILE", longer), ("DEVICE_LONG_TILE", longer)):
        monkeypatch.setattr(sight, name, size)


@pytest.mark.parametrize(("queries", "keys"), PLACES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("tile", "longer"), [(3, 4), (2, 20), (96, 512)])
def test_tiles_hold_what_is_seen_once(monkeypatch, band, queries, keys, tile, longer):
    small_tiles(monkeypatch, tile, longer)
    placed = band.at(queries, keys)
    shape = len(queries), len(keys)
    for blocks in (placed.query_blocks(np, *shape), placed.key_blocks(np, *shape)):
        counts = np.zeros(shape, int)
        for each in (each for block in blocks for each in block.tiles):
            rows, cols = each.query_positions, each.key_positions
            assert (rows[0], cols[0]) == (queries[each.queries.start], keys[each.keys.start])
            i, j = np.arange(len(rows))[:, None], np.arange(len(cols))[None, :]
            mask = (j >= each.unseen + i) & (j < each.seen + i)
            assert mask.any(axis=1).all(), "every query of a tile sees a key of it"
            counts[each.queries, each.keys] += mask
        np.testing.assert_array_equal(counts, seen(band, queries, keys))
    np.testing.assert_array_equal(np.array(placed.seeing()), np.flatnonzero(seen(band, queries, keys).any(axis=1)))


class Capped(ScoreChange):
    """A cap, and a bias that grows with the head and the distance."""

    def forward(self, scores, head, queries, keys):
        xp_scores = to_host(scores)
        xp_scores = 2.0 * np.tanh(xp_scores / 2.0) + self.bias(head, queries, keys)
        scores[...] = from_host(xp_scores, type_of(scores))

    def backward(self, dscores, scores, head, queries, keys):
        dscores *= 1.0 - from_host(np.tanh(to_host(scores) / 2.0) ** 2, type_of(scores))

    @staticmethod
    def bias(head, queries, keys):
        return 0.1 * (head + 1) * (np.array(keys)[None, :] - np.array(queries)[:, None])


def type_of(x):
    from mpitp.backend.arrays import array_module

    return array_module(x)


def plain(q, k, v, kv_index, scale, band, places, change):
    hidden = ~seen(band, *places)
    o = np.empty(q.shape)
    for head, kv in enumerate(kv_index):
        scores = scale * q[:, head] @ k[:, kv].T
        if change is not None:
            scores = 2.0 * np.tanh(scores / 2.0) + change.bias(head, *places)
        scores[hidden] = -np.inf
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        o[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, kv]
    return o


@pytest.mark.parametrize("band", [CAUSAL, EVERYTHING, Band(behind=4)])
@pytest.mark.parametrize("change", [None, Capped()])
@pytest.mark.parametrize("longer", [4, 512])
def test_attention_through_tiles(xp, rng, monkeypatch, band, change, longer):
    small_tiles(monkeypatch, 3, longer)
    kv_index, s, u = [0, 0, 1], 13, 15
    q, k, v = (rng.standard_normal((n, heads, 4)) for n, heads in ((s, 3), (u, 2), (u, 2)))
    heads = HeadMap(kv_index, 0.7, kv_index, 2, change)

    def forward(q, k, v):
        return attention_forward(q, k, v, heads, sight=band)[0]

    def backward(do, q, k, v):
        o, lse = attention_forward(q, k, v, heads, sight=band)
        return attention_backward(do, Kept(q, k, v, o, lse), heads, sight=band)

    check_gradients(forward, backward, [q, k, v], xp)
    o = to_host(forward(*(from_host(x.copy(), xp) for x in (q, k, v))))
    np.testing.assert_allclose(o, plain(q, k, v, kv_index, 0.7, band, (range(u - s, u), range(u)), change), atol=1e-13)


@pytest.mark.parametrize("band", [CAUSAL, EVERYTHING, Band(behind=9)])
def test_keys_that_come_in_pieces(rng, band):
    """What is finished for each piece of the keys, joined, is attention over all; so are the gradients, added up."""
    heads, s = HeadMap([0, 0], 0.5, [0, 0], 1), 24
    q, do = rng.standard_normal((2, s, 2, 4))
    k, v = rng.standard_normal((2, s, 1, 4))
    whole, whole_lse = attention_forward(q, k, v, heads, sight=band)
    kept = Kept(q, k, v, whole, whole_lse)
    expected = attention_backward(do, kept, heads, sight=band)
    o, lse = np.zeros_like(q), np.full((2, s), -np.inf)
    grads = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for keys in (range(8), range(8, 13), range(13, 24)):
        rows = band.at(range(s), keys).seeing()
        at, cols = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        placed = band.at(rows, keys)
        join_finished(o[at], lse[:, at], *attention_forward(q[at], k[cols], v[cols], heads, sight=placed))
        part = Kept(q[at], k[cols], v[cols], whole[at], whole_lse[:, at])
        dq, dk, dv = attention_backward(do[at], part, heads, sight=placed)
        for total, own in zip(grads, (dq, dk, dv), strict=True):
            total[at if own is dq else cols] += own
    np.testing.assert_allclose(o, whole, atol=1e-14)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-14)
    for total, own in zip(grads, expected, strict=True):
        np.testing.assert_allclose(total, own, atol=1e-13)
