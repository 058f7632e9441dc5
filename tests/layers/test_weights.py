"""Dealing by weight: nobody could be done earlier, everybody deals alike, and equal weights are no weights."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitp.comm import abstract_mesh
from mpitp.comm.mesh import AXES
from mpitp.layers.partition import counts_by_weight, piece_of, share_heads, share_of, split_by_weight, split_evenly
from mpitp.layers.site import make_site
from mpitp.layers.speeds import weights_of_speeds

quick = settings(max_examples=60, deadline=None, derandomize=True)
WEIGHT = st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.integers(1, 9).map(float))
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=7).filter(any).map(tuple)


def seconds(counts: tuple[int, ...], weights: tuple[float, ...]) -> float:
    """When the last part is done."""
    return max(n / w if w else math.inf for n, w in zip(counts, weights, strict=True) if n or w)


@quick
@given(st.integers(0, 300), WEIGHTS)
def test_all_units_are_dealt_and_no_part_gets_less_than_its_whole_units(units: int, weights: tuple[float, ...]) -> None:
    pieces = split_by_weight(units, len(weights), weights)
    assert [unit for piece in pieces for unit in piece] == list(range(units))
    for piece, weight in zip(pieces, weights, strict=True):
        assert len(piece) >= math.floor(units * weight / sum(weights) - 1e-9)
        assert weight or not piece


@quick
@given(st.integers(1, 8), st.lists(WEIGHT, min_size=2, max_size=3).filter(any).map(tuple))
def test_no_dealing_is_done_earlier(units: int, weights: tuple[float, ...]) -> None:
    every = (c for c in product(range(units + 1), repeat=len(weights)) if sum(c) == units)
    best = min(seconds(counts, weights) for counts in every)
    assert seconds(counts_by_weight(units, weights), weights) <= best * (1 + 1e-12)


@quick
@given(st.integers(0, 70), st.integers(1, 9), st.floats(1e-3, 1e3))
def test_equal_weights_are_none(units: int, parts: int, weight: float) -> None:
    assert (
        split_by_weight(units, parts, (weight,) * parts) == split_evenly(units, parts) == split_by_weight(units, parts)
    )


def test_extreme_weights() -> None:
    assert counts_by_weight(10, (5e-324, 1.7e308)) == (0, 10)
    assert counts_by_weight(150_000, (1e-300, 1e-300, 2e-300)) == (37_500, 37_500, 75_000)
    assert counts_by_weight(3, (0.0, 1.0)) == (0, 3)
    assert counts_by_weight(2, (2.0, 1.0)) == (1, 1)  # as early as 2 and 0, and with less to send


@quick
@given(st.integers(1, 6), st.integers(1, 5), WEIGHTS, st.integers(0, 6))
def test_heads(kv_heads: int, group_size: int, weights: tuple[float, ...], num_blocks: int) -> None:
    """Every head once, each with the KV head it uses; a KV head on several ranks is known as such, and owned once."""
    heads, ranks = kv_heads * group_size, len(weights)
    num_blocks = min(num_blocks, heads)
    shares = [share_heads(heads, kv_heads, rank, ranks, num_blocks, weights) for rank in range(ranks)]
    assert [head for share in shares for head in share.query.span] == list(range(heads))
    assert all(h // group_size in share.kv for share in shares for h in share.query.span)
    assert [kv for share in shares for kv in share.kv_owned] == list(range(kv_heads))
    on_several = tuple(kv for kv in range(kv_heads) if sum(kv in share.kv for share in shares) > 1)
    assert all(share.kv_shared == on_several for share in shares)


def test_blocks_are_dealt_whole() -> None:
    shares = [share_of(37, rank, 2, 6, (2.0, 1.0)) for rank in range(2)]
    assert [len(share.blocks) for share in shares] == [4, 2]
    assert shares[0].blocks + shares[1].blocks == split_evenly(37, 6)


def test_example() -> None:
    assert [piece_of(9, part, 3, (1, 0, 2)) for part in range(3)] == [range(3), range(3, 3), range(3, 9)]


def sizes(**axes: int) -> dict[str, int]:
    return {axis: axes.get(axis, 1) for axis in AXES}


@pytest.mark.parametrize(
    ("speeds", "axes", "expected"),
    [
        ([1.0, 0.5], {"tp": 2}, {"tp": (1.0, 0.5)}),
        ([1.0, 0.92], {"tp": 2}, {}),  # that near is noise
        ([0.5, 1.0], {"pp": 2}, {"pp": (0.5, 1.0)}),
        ([0.5, 1.0], {"cp": 2}, {}),  # nothing is dealt by weight along cp
        ([0.5, 0.5, 1.0, 1.0], {"dp": 2, "tp": 2}, {"dp": (0.5, 1.0)}),  # a slow node of two
        ([0.5, 1.0, 0.5, 1.0], {"dp": 2, "tp": 2}, {"tp": (0.5, 1.0)}),
        ([0.5, 1.0, 1.0, 1.0], {"dp": 2, "tp": 2}, {"tp": (0.5, 1.0)}),  # the other slow place is worth it as it is
        ([0.25, 0.5, 0.5, 1.0], {"dp": 2, "tp": 2}, {"tp": (0.5, 1.0), "dp": (0.5, 1.0)}),
    ],
)
def test_weights_of_speeds(speeds: list[float], axes: dict[str, int], expected: dict[str, tuple[float, ...]]) -> None:
    assert weights_of_speeds(speeds, sizes(**axes)) == expected


def held(rank: int, **options: bool) -> tuple[int, ...]:
    """Query heads, FFN columns, words, classes and rows of tokens on a rank of two, the first with twice the weight."""
    site = make_site(abstract_mesh({"tp": 2}, rank, weights={"tp": [2, 1]}), **options)
    units = site.heads(9, 3).query, site.share(30), site.share(257), site.share_of_few(2)
    return (*(share.size for share in units), len(site.token_share(6)))


def test_what_a_site_deals() -> None:
    assert [held(rank) for rank in (0, 1)] == [(6, 20, 171, 1, 6), (3, 10, 86, 1, 6)]
    assert [held(rank, sequence_parallel=True)[-1] for rank in (0, 1)] == [4, 2]


def test_weights_along_several_axes() -> None:
    mesh = abstract_mesh({"dp": 2, "ep": 2, "tp": 2}, weights={"ep": [1, 2], "tp": [3, 3]})
    assert mesh.weights("tp") == () == mesh.weights("dp")  # equal ones are none
    assert mesh.weights("dp", "ep") == (1, 2, 1, 2)
