"""The comparison with the reference turns red when the parallel code is broken: a test of the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mpitp.layers.site
from mpitp.comm import ThreadGroup, run_threads
from mpitp.layers.partition import HeadShare, share_heads
from tests.parity.golden_case import GOLDEN, compare, golden_arrays

RANKS = [2, 3, 4, 5, 7]


def is_red(case: str, ranks: int) -> bool:
    """Whether the comparison fails on any rank, by a difference or by an error on the way."""
    try:
        results = run_threads(ranks, compare, GOLDEN / case, golden_arrays(case))
    except Exception:  # a fault may break shapes first
        return True
    return any(not value < 1e-6 for differences in results for value in differences.values())


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_that_returns_the_local_value(case: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_red(case, ranks)

    def local(group: Any, x: Any, op: str = "sum", out: Any = None) -> Any:
        return x

    monkeypatch.setattr(ThreadGroup, "all_reduce", local)
    assert is_red(case, ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_query_heads_that_meet_a_neighbours_kv_heads(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(heads: int, kv_heads: int, rank: int, ranks: int, num_blocks: int = 0) -> HeadShare:
        own = share_heads(heads, kv_heads, rank, ranks, num_blocks)
        return replace(own, kv=share_heads(heads, kv_heads, (rank + 1) % ranks, ranks, num_blocks).kv)

    monkeypatch.setattr(mpitp.layers.site, "share_heads", wrong)
    assert is_red("llama-gqa", ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_head_computed_twice(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(heads: int, kv_heads: int, rank: int, ranks: int, num_blocks: int = 0) -> HeadShare:
        return share_heads(heads, kv_heads, max(rank, 1), ranks, num_blocks)  # rank 0 takes rank 1's heads

    monkeypatch.setattr(mpitp.layers.site, "share_heads", wrong)
    assert is_red("gpt2", ranks)
