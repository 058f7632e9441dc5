from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import sight
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward, attention_reference
from tests.ops.checks import assert_like, assert_rounding_close, check_gradients

SCALE = 0.35


def qkv(rng, s, u, heads, kv_heads, d, dtype=np.float64):
    shapes = [(s, heads, d), (u, kv_heads, d), (u, kv_heads, d)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def on(xp, arrays):
    return [from_host(x.copy(), xp) for x in arrays]


def set_tile(monkeypatch, size):
    monkeypatch.setattr(sight, "TILE", size)
    monkeypatch.setattr(sight, "DEVICE_TILE", size)


def gradients(kv_index, num_grads, dropout=None):
    def backward(do, q, k, v):
        o, lse = attention_forward(q, k, v, HeadMap(kv_index, SCALE), dropout=dropout)
        return attention_backward(
            do, Kept(q, k, v, o, lse), HeadMap(kv_index, SCALE, kv_index, num_grads), dropout=dropout
        )

    return backward


@pytest.mark.parametrize(("s", "u"), [(1, 1), (1, 6), (7, 7), (8, 9), (9, 9), (0, 0), (5, 12)])
@pytest.mark.parametrize("kv_index", [[0, 1, 2], [0, 0, 1], [0, 0, 0]])
@pytest.mark.parametrize("tile", [3, 128])
def test_gradients(xp, rng, monkeypatch, s, u, kv_index, tile):
    set_tile(monkeypatch, tile)
    kv_heads = max(kv_index) + 1
    check_gradients(
        lambda q, k, v: attention_forward(q, k, v, HeadMap(kv_index, SCALE))[0],
        gradients(kv_index, kv_heads),
        qkv(rng, s, u, 3, kv_heads, 5),
        xp,
    )


@pytest.mark.parametrize("tile", [3, 128])
def test_gradients_with_dropout(xp, rng, monkeypatch, tile):
    set_tile(monkeypatch, tile)
    masks = (rng.random((3, 8, 9)) < 0.6) / 0.6

    def dropout(head, queries, keys):
        return from_host(masks[head, queries.start : queries.stop, keys.start : keys.stop].copy(), xp)

    inputs = qkv(rng, 8, 9, 3, 2, 5)
    check_gradients(
        lambda q, k, v: attention_forward(q, k, v, HeadMap([0, 0, 1], SCALE), dropout=dropout)[0],
        gradients([0, 0, 1], 2, dropout),
        inputs,
        xp,
    )
    o, lse = attention_forward(*on(xp, inputs), HeadMap([0, 0, 1], SCALE), dropout=dropout)
    plain_o, plain_lse = attention_forward(*on(xp, inputs), HeadMap([0, 0, 1], SCALE))
    np.testing.assert_array_equal(to_host(lse), to_host(plain_lse))
    assert not np.allclose(to_host(o), to_host(plain_o))
    q, k, v = inputs
    for head, kv in enumerate([0, 0, 1]):
        scores = SCALE * q[:, head] @ k[:, kv].T
        scores[np.arange(9)[None, :] > np.arange(8)[:, None] + 1] = -np.inf
        p = np.exp(scores - scores.max(1, keepdims=True))
        expected = (p / p.sum(1, keepdims=True) * masks[head]) @ v[:, kv]
        np.testing.assert_allclose(to_host(o)[:, head], expected, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("s", "u"), [(1, 40), (40, 40), (33, 40)])
@pytest.mark.parametrize("tile", [7, 16, 128])
def test_equals_the_plain_expression_on_views_of_a_fused_array(xp, rng, monkeypatch, dtype, s, u, tile):
    set_tile(monkeypatch, tile)
    heads, kv_heads, d = 4, 2, 8
    kv_index = [0, 0, 1, 1]
    host = rng.standard_normal((u, (heads + 2 * kv_heads) * d)).astype(dtype)
    fused = from_host(host.copy(), xp).reshape(u, heads + 2 * kv_heads, d)
    q, k, v = fused[u - s :, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    wide = [to_host(x).astype(np.float64) for x in (q, k, v)]
    expected = attention_reference(*wide, kv_index, SCALE)
    o, lse = attention_forward(q, k, v, HeadMap(kv_index, SCALE))
    assert_like(o, dtype, xp)
    assert_like(lse, dtype, xp)
    assert lse.shape == (heads, s)
    assert_rounding_close(o, expected, 16)
    out = from_host(np.zeros((s, heads + 1, d), dtype), xp)[:, 1:]
    assert attention_forward(q, k, v, HeadMap(kv_index, SCALE), out=out)[0] is out
    np.testing.assert_array_equal(to_host(out), to_host(o))

    do = from_host(rng.standard_normal((s, heads, d)).astype(dtype), xp)
    plain = attention_backward(do, Kept(q, k, v, o, lse), HeadMap(kv_index, SCALE, kv_index, kv_heads))
    grads = from_host(np.zeros((u, heads + 2 * kv_heads, d), dtype), xp)
    views = {
        "dq": grads[u - s :, :heads],
        "dk": grads[:, heads : heads + kv_heads],
        "dv": grads[:, heads + kv_heads :],
    }
    attention_backward(
        do, Kept(q, k, v, o, lse), HeadMap(kv_index, SCALE, kv_index, kv_heads), out=tuple(views.values())
    )
    for a, b in zip(plain, views.values(), strict=True):
        assert_like(a, dtype, xp)
        np.testing.assert_array_equal(to_host(a), to_host(b))
    np.testing.assert_array_equal(to_host(fused).reshape(host.shape), host)


def test_a_slot_a_head_sums_to_a_slot_a_kv_head(xp, rng):
    kv_index = [0, 0, 1]
    q, k, v = on(xp, qkv(rng, 9, 9, 3, 2, 8, np.float32))
    do = from_host(rng.standard_normal((9, 3, 8)).astype(np.float32), xp)
    o, lse = attention_forward(q, k, v, HeadMap(kv_index, SCALE))
    dq, dk, dv = attention_backward(do, Kept(q, k, v, o, lse), HeadMap(kv_index, SCALE, kv_index, 2))
    dq_, dk_, dv_ = attention_backward(do, Kept(q, k, v, o, lse), HeadMap(kv_index, SCALE, range(3), 3))
    np.testing.assert_array_equal(to_host(dq), to_host(dq_))
    for summed, apart in ((to_host(dk), to_host(dk_)), (to_host(dv), to_host(dv_))):
        np.testing.assert_array_equal(summed[:, 0], apart[:, 0] + apart[:, 1])
        np.testing.assert_array_equal(summed[:, 1], apart[:, 2])


@pytest.mark.parametrize(("s", "u"), [(1, 100), (70, 70), (200, 200), (90, 150)])
def test_a_head_has_the_same_bits_whatever_its_neighbours(rng, s, u):
    q, k, v = qkv(rng, s, u, 6, 3, 16, np.float32)
    do = rng.standard_normal(q.shape).astype(np.float32)
    kv_index = [0, 0, 1, 1, 2, 2]
    o, lse = attention_forward(q, k, v, HeadMap(kv_index, SCALE))
    dq, dk, dv = attention_backward(do, Kept(q, k, v, o, lse), HeadMap(kv_index, SCALE, range(6), 6))
    for first, last in ((0, 2), (2, 5), (5, 6)):
        heads, kv = slice(first, last), slice(kv_index[first], kv_index[last - 1] + 1)
        part = [np.ascontiguousarray(x) for x in (q[:, heads], k[:, kv], v[:, kv])]
        part_index = [j - kv.start for j in kv_index[heads]]
        o_part, lse_part = attention_forward(*part, HeadMap(part_index, SCALE))
        np.testing.assert_array_equal(o_part, o[:, heads])
        np.testing.assert_array_equal(lse_part, lse[heads])
        slots = range(last - first)
        grads = attention_backward(
            do[:, heads], Kept(*part, o_part, lse_part), HeadMap(part_index, SCALE, slots, len(slots))
        )
        for got, whole in zip(grads, (dq, dk, dv), strict=True):
            np.testing.assert_array_equal(got, whole[:, heads])


def test_no_heads_and_no_slots(xp):
    q, k, v = (from_host(np.ones((4, 0, 8), np.float32), xp) for _ in range(3))
    o, lse = attention_forward(q, k, v, HeadMap([], SCALE))
    assert o.shape == (4, 0, 8) and lse.shape == (0, 4)
    dq, dk, dv = attention_backward(o, Kept(q, k, v, o, lse), HeadMap([], SCALE, [], 0))
    assert dq.shape == (4, 0, 8) and dk.shape == dv.shape == (4, 0, 8)


def test_large_scores_do_not_overflow(xp, rng):
    q, k, v = (x * 100 for x in qkv(rng, 9, 9, 1, 1, 4, np.float32))
    o, lse = attention_forward(*on(xp, [q, k, v]), HeadMap([0], 1.0))
    assert np.isfinite(to_host(o)).all() and np.isfinite(to_host(lse)).all()
    grads = attention_backward(o, Kept(*on(xp, [q, k, v]), o, lse), HeadMap([0], 1.0, [0], 1))
    assert all(np.isfinite(to_host(g)).all() for g in grads)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("s", [1, 8, 33])
@pytest.mark.parametrize("tile", [7, 128])
def test_everything_is_seen(xp, rng, monkeypatch, dtype, s, tile):
    set_tile(monkeypatch, tile)
    q, k, v = qkv(rng, s, s, 2, 1, 5, dtype)
    scores = SCALE * np.einsum("shd,ud->hsu", q, k[:, 0])
    p = np.exp(scores - scores.max(2, keepdims=True))
    expected = np.einsum("hsu,ud->shd", p / p.sum(2, keepdims=True), v[:, 0])
    o, _ = attention_forward(*on(xp, (q, k, v)), HeadMap([0, 0], SCALE), sight=sight.EVERYTHING)
    assert_rounding_close(o, expected, 16)


@pytest.mark.parametrize("tile", [3, 128])
def test_gradients_where_everything_is_seen(xp, rng, monkeypatch, tile):
    set_tile(monkeypatch, tile)
    heads = HeadMap([0, 0, 1], SCALE)

    def backward(do, q, k, v):
        o, lse = attention_forward(q, k, v, heads, sight=sight.EVERYTHING)
        return attention_backward(do, Kept(q, k, v, o, lse), heads, sight=sight.EVERYTHING)

    check_gradients(
        lambda q, k, v: attention_forward(q, k, v, heads, sight=sight.EVERYTHING)[0],
        backward,
        qkv(rng, 8, 8, 3, 2, 5),
        xp,
    )
