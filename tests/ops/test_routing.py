"""Routers: choices, scores, sorted rows and auxiliary losses against plain loops, and every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops.balance import balance_gradient, balance_loss, tally_of, z_gradient, z_loss
from mpitp.ops.routing import (
    capacity_of,
    choose_experts,
    choose_experts_backward,
    combine_backward,
    combine_forward,
    dispatch_backward,
    dispatch_forward,
    order_by_expert,
)
from tests.ops.checks import assert_like, check_gradients

E, K, H = 5, 2, 3


def logits_of(rng: Any, t: int) -> np.ndarray:
    """No two nearly equal, so that no small step changes the choice."""
    return np.array([rng.permutation(E) * 0.7 + rng.uniform(-0.1, 0.1, E) for _ in range(t)]).reshape(t, E)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("t", [0, 1, 7, 9])
def test_scores_and_their_gradient(xp, rng, t, normed):
    logits, more = logits_of(rng, t), rng.standard_normal(E)
    choice = choose_experts(from_host(logits, xp), K, normed=normed)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for row in range(t):
        best = sorted(range(E), key=lambda i: -probs[row, i])[:K]
        assert choice.chosen[row].tolist() == best
        wanted = probs[row, best] / (probs[row, best].sum() if normed else 1.0)
        np.testing.assert_allclose(to_host(choice.scores)[row], wanted, rtol=1e-12)
    np.testing.assert_allclose(to_host(choice.log_sums), np.log(np.exp(logits).sum(1)), rtol=1e-12)

    def backward(dy: Any, x: Any) -> list[Any]:
        return [choose_experts_backward(dy, choose_experts(x, K, normed=normed), normed=normed)]

    check_gradients(lambda x: choose_experts(x, K, normed=normed).scores, backward, [logits], xp)
    extra = choose_experts_backward(xp.zeros((t, K)), choice, normed=normed, more=from_host(more, xp))
    np.testing.assert_allclose(to_host(extra), probs * (more - (probs @ more)[:, None]), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_first_of_equal_experts_is_chosen_and_the_dtype_kept(xp, dtype):
    choice = choose_experts(xp.zeros((2, E), dtype), K, normed=False)
    assert choice.chosen.tolist() == [[0, 1]] * 2
    assert_like(choice.scores, dtype, xp)
    assert_like(choose_experts_backward(choice.scores, choice, normed=False), dtype, xp)


def test_large_logits_do_not_overflow(xp):
    choice = choose_experts(from_host(np.array([[1e4, 0.0, -1e4]], np.float32), xp), 1, normed=False)
    assert to_host(choice.scores).tolist() == [[1.0]] and to_host(choice.log_sums).tolist() == [1e4]


def plain_mixture(x: np.ndarray, scores: np.ndarray, chosen: np.ndarray, capacity: int) -> np.ndarray:
    """y = sum_j s_j (c_j + 2) x, expert i taking the first `capacity` tokens that come."""
    taken, y = [0] * E, np.zeros_like(x)
    for token, experts in enumerate(chosen):
        for j, expert in enumerate(experts):
            taken[expert] += 1
            if not capacity or taken[expert] <= capacity:
                y[token] += scores[token, j] * (expert + 2) * x[token]
    return y


@pytest.mark.parametrize("capacity", [0, 1, 2])
@pytest.mark.parametrize("t", [0, 1, 7, 9])
def test_sorted_rows_there_and_back(xp, rng, t, capacity):
    chosen = np.array([rng.permutation(E)[:K] for _ in range(t)], np.int64).reshape(t, K)
    chosen[: t // 2] = [3, 1]  # a hot expert
    order = order_by_expert(chosen, E, xp, capacity)
    factors = from_host(np.repeat(np.arange(E), order.counts)[:, None] + 2.0, xp)
    most = capacity or t
    assert order.counts.tolist() == np.minimum(np.bincount(chosen.reshape(-1), minlength=E), most).tolist()
    x, scores = rng.standard_normal((t, H)), rng.standard_normal((t, K))

    def forward(x: Any, scores: Any) -> Any:
        return combine_forward(factors * dispatch_forward(x, order), scores, order)

    def backward(dy: Any, x: Any, scores: Any) -> list[Any]:
        rows = factors * dispatch_forward(x, order)
        drows, dscores = combine_backward(dy, rows, scores, order)
        return [dispatch_backward(factors * drows, order), dscores]

    y = forward(from_host(x, xp), from_host(scores, xp))
    np.testing.assert_allclose(to_host(y), plain_mixture(x, scores, chosen, capacity), rtol=1e-12, atol=1e-14)
    check_gradients(forward, backward, [x, scores], xp)


def test_the_capacity_is_a_multiple_of_an_even_share():
    assert [capacity_of(factor, 16, 2, 5) for factor in (0.0, 0.01, 1.0, 1.25, 2.0)] == [0, 1, 7, 8, 13]


def test_losses_of_an_even_and_of_a_single_minded_router(rng):
    even = tally_of(choose_experts(np.tile(np.eye(4), (2, 1)) * 1e-9, 1, normed=False))
    assert balance_loss(even) == pytest.approx(1.0) and z_loss(even) == pytest.approx(np.log(4) ** 2)
    single = tally_of(choose_experts(np.tile([50.0, 0, 0, 0], (6, 1)), 1, normed=False))
    assert balance_loss(single) == pytest.approx(4.0)
    nobody = tally_of(choose_experts(np.zeros((0, 4)), 1, normed=False))
    assert balance_loss(nobody) == z_loss(nobody) == 0.0


@pytest.mark.parametrize("blocks", [1, 3])
def test_gradients_of_the_losses(rng, blocks):
    """Of the sum over blocks: every block's rows count in one mean."""
    logits = [logits_of(rng, 7) for _ in range(blocks)]

    def losses(moved: list[np.ndarray]) -> np.ndarray:
        tally = sum(tally_of(choose_experts(each, K, normed=True)) for each in moved)
        return np.array([balance_loss(tally), z_loss(tally)])

    choices = [choose_experts(each, K, normed=True) for each in logits]
    tally = sum(tally_of(choice) for choice in choices)
    step, direction = 1e-6, [rng.standard_normal(each.shape) for each in logits]
    ends = [losses([x + sign * step * d for x, d in zip(logits, direction, strict=True)]) for sign in (1, -1)]
    slopes = (ends[0] - ends[1]) / (2 * step)
    even = [
        choose_experts_backward(np.zeros((7, K)), choice, normed=True, more=balance_gradient(tally))
        for choice in choices
    ]
    small = [z_gradient(tally) * choice.log_sums[:, None] * choice.probs for choice in choices]
    for slope, grads in zip(slopes, (even, small), strict=True):
        found = sum(float((grad * d).sum()) for grad, d in zip(grads, direction, strict=True))
        assert found == pytest.approx(slope, rel=1e-6, abs=1e-9)
