from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import row_blocks
from mpitp.ops.cross_entropy import cross_entropy_backward, cross_entropy_reference, exp_sums, row_max, target_logits
from tests.ops.checks import assert_like, check_gradients

SHARDS = [(0, 4), (4, 4), (4, 9), (9, 11)]  # one of them empty


def sharded_loss(logits, targets, shards, xp):
    """Losses and, for each shard, what the backward needs."""
    parts = [logits[:, a:b] for a, b in shards]
    largest = from_host(np.max([to_host(row_max(p)) for p in parts], axis=0), xp)
    sums, es, target = 0, [], 0
    for part, (a, b) in zip(parts, shards, strict=True):
        e, block_sums = exp_sums(part, largest, [range(0, 2), range(2, b - a)] if b - a > 2 else [range(b - a)])
        es.append(e)
        sums = sums + to_host(block_sums).sum(axis=0)
        target = target + to_host(target_logits(part, targets, a))
    return np.log(sums) + to_host(largest) - target, es, from_host(np.asarray(sums), xp)


@pytest.mark.parametrize("t", [0, 1, 7, 9])
@pytest.mark.parametrize("shards", [[(0, 11)], SHARDS])
def test_gradients(xp, rng, t, shards):
    targets = from_host(rng.integers(0, 11, t), xp)

    def forward(logits):
        return from_host(sharded_loss(logits, targets, shards, xp)[0], xp)

    def backward(dlosses, logits):
        _, es, denominators = sharded_loss(logits, targets, shards, xp)
        parts = [
            to_host(cross_entropy_backward(e, targets, a, denominators, dlosses))
            for e, (a, _) in zip(es, shards, strict=True)
        ]
        return [from_host(np.concatenate(parts, axis=1), xp)]

    check_gradients(forward, backward, [rng.standard_normal((t, 11)) * 3], xp)


def test_losses_are_those_of_the_plain_expression(xp, rng):
    logits, targets = (rng.standard_normal((9, 11)) * 5).astype(np.float32), rng.integers(0, 11, 9)
    expected = cross_entropy_reference(logits.astype(np.float64), targets)
    losses, _, _ = sharded_loss(from_host(logits, xp), from_host(targets, xp), SHARDS, xp)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)


def test_ignored_rows_have_no_target_and_no_gradient(xp, rng):
    logits = from_host(rng.standard_normal((4, 5)).astype(np.float32), xp)
    targets = from_host(np.array([2, -100, 0, -1]), xp)
    largest = row_max(logits)
    e, sums = exp_sums(logits, largest, [range(5)])
    target = target_logits(logits, targets, 0)
    assert_like(target, np.float32, xp)
    np.testing.assert_array_equal(to_host(target)[[1, 3]], 0)
    weights = from_host(np.array([0.5, 0, 0.5, 0], np.float32), xp)
    grad = cross_entropy_backward(e, targets, 0, sums[0], weights)
    assert_like(grad, np.float32, xp)
    np.testing.assert_array_equal(to_host(grad)[[1, 3]], 0)
    np.testing.assert_allclose(to_host(grad).sum(axis=1), 0, atol=1e-7)


def test_a_target_of_another_shard_is_zero_here(xp):
    logits = from_host(np.ones((5, 3), np.float32), xp)
    targets = from_host(np.array([9, 10, 11, 12, 13]), xp)
    np.testing.assert_array_equal(to_host(target_logits(logits, targets, 10)), [0, 1, 1, 1, 0])


@pytest.mark.parametrize("t", [0, 3])
def test_a_shard_without_columns(xp, t):
    logits = from_host(np.ones((t, 0), np.float32), xp)
    targets = from_host(np.zeros(t, np.int64), xp)
    largest = row_max(logits)
    assert_like(largest, np.float32, xp)
    np.testing.assert_array_equal(to_host(largest), np.full(t, -np.inf))
    ones = from_host(np.ones(t, np.float32), xp)
    e, sums = exp_sums(logits, ones, [])
    assert e.shape == (t, 0) and sums.shape == (0, t)
    assert_like(sums, np.float32, xp)
    assert_like(target_logits(logits, targets, 4), np.float32, xp)
    assert cross_entropy_backward(e, targets, 4, ones, ones).shape == (t, 0)


@pytest.mark.parametrize("t", [1, 2, 37])
@pytest.mark.parametrize("cols", [1, 7, 515])
def test_bits_do_not_depend_on_the_block_size_or_the_shard(rng, monkeypatch, t, cols):
    logits, targets = rng.standard_normal((t, cols + 9)).astype(np.float32), rng.integers(0, cols, t)
    weights = rng.random(t).astype(np.float32)
    results = []
    for block_bytes in (1, 4000, 1 << 22):
        monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
        largest = row_max(logits)
        e, sums = exp_sums(logits, largest, [range(9), range(9, cols + 9)])
        own, own_sums = exp_sums(logits[:, 9:].copy(), largest, [range(cols)])
        np.testing.assert_array_equal(own, e[:, 9:])
        np.testing.assert_array_equal(own_sums[0], sums[1])
        results.append([largest, e, sums, cross_entropy_backward(e, targets, 0, sums[0] + sums[1], weights)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
