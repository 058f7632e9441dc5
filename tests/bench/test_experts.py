"""The benchmark of mixtures of experts, on one rank and on thread ranks."""

from __future__ import annotations

import pytest

from mpitp.bench import experts
from mpitp.comm import SerialGroup, run_threads
from mpitp.errors import UsageError
from tests.bench.test_command import parsed

SMALL = ["experts", "--layers", "2", "--hidden", "8", "--heads", "2", "--ffn", "5", "--vocab", "16", "--experts", "3"]
SMALL += ["--seq", "4", "--batch", "2", "--rounds", "2"]


def test_the_floor_is_of_the_rows_as_routed() -> None:
    args = parsed(*SMALL, "--shared", "6")
    facts = experts.measure(args, SerialGroup())
    step, floor = facts["step_seconds"]["least"], facts["floor_seconds"]["least"]
    assert facts["step_to_floor"]["least"] == pytest.approx(step / floor)
    assert facts["rows_of_experts"]["mean"] == pytest.approx(2 * 8 / 3)
    assert "exchange" not in facts
    assert any("6 columns of a shared one" in line for line in experts.report(facts))


def test_products_are_those_of_every_experts_rows() -> None:
    """Two linears of three products each: 6 x the weights of an expert, for each row."""
    from mpitp.bench.random_model import random_model
    from mpitp.bench.train import batch_to_time
    from mpitp.layers.site import make_site

    config = experts.mixture_config(parsed(*SMALL))
    model = random_model(config, make_site(SerialGroup()))
    rows = experts.routed_rows(model, batch_to_time(config, 2, 4))
    assert [int(counts.sum()) for counts in rows] == [2 * 8, 2 * 8]
    assert sum(product.flops for product in experts.expert_products(model, rows)) == 2 * 16 * 6 * (3 * 5 * 8)
    assert "forward" not in vars(experts.experts_of(model)[0])


def test_exchanges_are_timed_at_once_too_and_counted() -> None:
    facts = run_threads(2, lambda group: experts.measure(parsed(*SMALL), group))
    assert facts[0]["exchange"] == facts[1]["exchange"]
    found = facts[0]["exchange"]
    # 2 blocks x (2 ways forward, 2 backward) x 2 copies x 16 tokens x 8 numbers x 4 bytes, and 2 x 2 ranks' 3 counts
    assert found["bytes"] == found["expected_bytes"] == 2 * 4 * 2 * 16 * 8 * 4 + 2 * 2 * 3 * 8
    assert any("as the closed form says" in line for line in experts.report(facts[0]))


def test_more_experts_chosen_than_there_are() -> None:
    with pytest.raises(UsageError, match="--top-k 4 exceeds --experts 3"):
        experts.measure(parsed(*SMALL, "--top-k", "4"), SerialGroup())
