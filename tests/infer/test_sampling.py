"""Choosing tokens: limits, ties, and how often each token comes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mpitp.errors import UsageError
from mpitp.infer.sampling import Penalties, Sampling, likelihoods, uniform_draw

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2]))
MOST_LIKELY_FIRST = [1, 3, 4, 0, 2]
DRAWS = (np.arange(4000) + 0.5) / 4000


def shares(sampling: Sampling, logits: np.ndarray = LOGITS) -> np.ndarray:
    """How often each token is chosen over evenly spread draws."""
    return np.bincount([sampling.choose(logits, draw) for draw in DRAWS], minlength=len(logits)) / len(DRAWS)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_greedy() -> None:
    assert Sampling().choose(LOGITS, 0.99) == 1
    assert Sampling().choose(np.array([1.0, 3.0, 3.0]), 0.0) == 1, "a tie goes to the lowest id"
    assert Sampling(0.0, top_k=3, top_p=0.2).choose(LOGITS, 0.99) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature: float) -> None:
    np.testing.assert_allclose(shares(Sampling(temperature)), softmax(LOGITS / temperature), atol=5e-4)


def test_a_tiny_temperature_is_greedy_and_a_huge_one_even() -> None:
    assert Sampling(1e-300).choose(LOGITS, 0.999999) == 1
    np.testing.assert_allclose(shares(Sampling(1e9)), 0.2, atol=5e-4)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 100])
def test_top_k(k: int) -> None:
    kept = MOST_LIKELY_FIRST[:k]
    expected = np.zeros(5)
    expected[kept] = np.exp(LOGITS[kept]) / np.exp(LOGITS[kept]).sum()
    np.testing.assert_allclose(shares(Sampling(1.0, top_k=k)), expected, atol=5e-4)


@pytest.mark.parametrize(("p", "kept"), [(0.01, 1), (0.39, 1), (0.41, 2), (0.64, 2), (0.66, 3), (0.949, 4), (0.96, 5)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(p: float, kept: int) -> None:
    assert set(np.flatnonzero(shares(Sampling(1.0, top_p=p)))) == set(MOST_LIKELY_FIRST[:kept])


def test_top_p_is_of_what_top_k_left_and_after_temperature() -> None:
    assert set(np.flatnonzero(shares(Sampling(1.0, top_k=2, top_p=0.6)))) == {1}
    assert set(np.flatnonzero(shares(Sampling(100.0, top_p=0.41)))) == {1, 3, 4}


def test_ties_at_the_edge_go_to_the_lowest_ids() -> None:
    assert set(np.flatnonzero(shares(Sampling(1.0, top_k=2), np.zeros(4)))) == {0, 1}
    assert set(np.flatnonzero(shares(Sampling(1.0, top_p=0.5), np.zeros(4)))) == {0, 1}


def test_every_draw_gives_a_token_that_is_possible() -> None:
    logits = np.array([-np.inf, 0.0, -1e4, 5.0], np.float32)
    for draw in (0.0, 0.5, 1 - 2**-53):
        assert Sampling(1.0).choose(logits, draw) in (1, 3)
    assert Sampling(1e-300).choose(np.array([1e30, -1e30]), 0.5) == 0


def test_draws_are_uniform_and_independent() -> None:
    draws = np.array([[uniform_draw(3, row, i) for i in range(700)] for row in range(3)])
    assert draws.min() >= 0 and draws.max() < 1
    for row in draws:
        counts = np.bincount((row * 20).astype(int), minlength=20)
        chi_square = ((counts - 35) ** 2 / 35).sum()
        assert chi_square < 43.8, "beyond the 99.9 % point of 19 degrees of freedom"
    assert np.abs(np.corrcoef(draws) - np.eye(3)).max() < 0.1
    assert len({uniform_draw(seed, 0, 0) for seed in range(50)}) == 50
    assert uniform_draw(0, 1, 0) != uniform_draw(0, 0, 1)


def test_sampled_tokens_follow_the_distribution() -> None:
    tokens = [Sampling(1.0, seed=9).choose(LOGITS, uniform_draw(9, 0, i)) for i in range(2000)]
    expected = 2000 * softmax(LOGITS)
    chi_square = ((np.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum()
    assert chi_square < 18.5, "beyond the 99.9 % point of 4 degrees of freedom"


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_temperatures_that_cannot_be(temperature: float) -> None:
    with pytest.raises(UsageError, match="temperature must be"):
        Sampling(temperature)


@pytest.mark.parametrize("top_p", [0.0, -1.0, 2.0, 1.0001, math.nan])
def test_top_p_that_cannot_be(top_p: float) -> None:
    with pytest.raises(UsageError, match="top-p must lie"):
        Sampling(1.0, top_p=top_p)


def test_top_k_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="top-k must be at least 0"):
        Sampling(1.0, top_k=-1)


def plainly_chosen(sampling: Sampling, logits: np.ndarray, draw: float) -> int:
    """By the book: everything sorted."""
    scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    order = order[: sampling.top_k] if sampling.top_k else order
    weights = np.exp(scaled[order])
    order = order[weights >= sampling.min_p]
    cumulative = np.cumsum(np.exp(scaled[order]))
    if sampling.top_p < 1:
        keep = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        order, cumulative = order[:keep], cumulative[:keep]
    return int(order[min(int(np.searchsorted(cumulative, draw * cumulative[-1], side="right")), len(order) - 1)])


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 7}, {"top_k": 2000}, {"top_p": 0.6}, {"top_p": 0.99}, {"min_p": 0.05}, {"min_p": 1e-9}]
    + [{"top_p": 0.9, "min_p": 0.01}, {"top_k": 3000, "top_p": 0.8}],
    ids=str,
)
def test_looking_at_the_likeliest_first_changes_no_choice(settings: dict[str, Any], spread: float) -> None:
    rng = np.random.default_rng(1)
    sampling = Sampling(temperature=0.8, **settings)
    for _ in range(12):
        logits = (spread * rng.standard_normal(5000)).astype(np.float32).round(2)  # with ties
        draw = float(rng.random())
        assert sampling.choose(logits, draw) == plainly_chosen(sampling, logits, draw)


def test_tokens_that_must_not_come_do_not() -> None:
    logits = np.full(3000, -np.inf)
    logits[[5, 2999]] = 1.0, 2.0
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=2500), Sampling(3.0, top_p=0.999, min_p=0.1)):
        assert {sampling.choose(logits, draw) for draw in (0.0, 0.4, 0.8, 0.999999)} <= {5, 2999}


def test_penalties() -> None:
    logits = np.array([2.0, -2.0, 1.0, 1.0])
    assert Penalties(repetition=2.0).applied(logits, [0, 1], [2]).tolist() == [1.0, -4.0, 0.5, 1.0]
    assert Penalties(presence=0.5, frequency=0.25).applied(logits, [3], [2, 2]).tolist() == [2.0, -2.0, 0.0, 1.0]
    assert Penalties(bias={3: -5.0}).applied(logits, [3], []).tolist() == [2.0, -2.0, 1.0, -4.0]
    for wrong in (
        {"repetition": 5e-324},
        {"repetition": np.nan},
        {"presence": np.nan},
        {"frequency": np.inf},
        {"bias": {1: np.inf}},
    ):
        with pytest.raises(UsageError):
            Penalties(**wrong)
    with pytest.raises(UsageError, match="min-p"):
        Sampling(min_p=1.5)


def test_likelihoods_are_log_probabilities() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.4, 0.3])).astype(np.float64) + 3
    found = likelihoods(logits, 1, 2)
    assert np.isclose(found.chosen, np.log(0.2)) and [token for token, _ in found.best] == [2, 3]
    assert np.allclose(np.exp([value for _, value in found.best]), [0.4, 0.3])
    assert likelihoods(logits, 0, 0).best == ()
