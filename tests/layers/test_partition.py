"""Partition arithmetic: who holds which units, who owns them, which blocks are multiplied by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.errors import ConfigError
from mpitp.layers.attention import AttentionDropout, KvReplicas
from mpitp.layers.build import AttentionSizes, Builder
from mpitp.layers.partition import HeadShare, Share, share_heads, share_of, split_evenly
from mpitp.layers.site import make_site
from mpitp.layers.summation import LibrarySum

UNITS, RANKS = st.integers(1, 70), st.integers(1, 9)
quick = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int]:
    """Query heads and KV heads that share them evenly."""
    kv_heads = draw(st.integers(1, 9))
    return kv_heads * draw(st.integers(1, 5)), kv_heads


def joined(ranges: list[range]) -> list[int]:
    return [unit for each in ranges for unit in each]


@quick
@given(UNITS, st.integers(1, 80))
def test_split_evenly(units: int, parts: int) -> None:
    pieces = split_evenly(units, parts)
    sizes = [len(piece) for piece in pieces]
    assert joined(list(pieces)) == list(range(units))
    assert len(pieces) == parts and max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@quick
@given(UNITS, RANKS)
def test_plain_shares(units: int, ranks: int) -> None:
    shares = [share_of(units, rank, ranks) for rank in range(ranks)]
    assert joined([share.span for share in shares]) == list(range(units))
    assert max(share.size for share in shares) - min(share.size for share in shares) <= 1
    assert all(len(share.blocks) == min(share.size, 1) for share in shares)


@quick
@given(UNITS, st.data())
def test_blocks_are_the_same_at_any_rank_count(units: int, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, units))
    for ranks in range(1, num_blocks + 1):
        shares = [share_of(units, rank, ranks, num_blocks) for rank in range(ranks)]
        blocks = [block for share in shares for block in share.blocks]
        assert tuple(blocks) == split_evenly(units, num_blocks)
        for share in shares:
            assert joined(list(share.blocks)) == list(share.span)
            assert joined(list(share.local_blocks)) == list(range(share.size))


@quick
@given(UNITS, st.integers(1, 5), RANKS)
def test_scaled_share(units: int, factor: int, ranks: int) -> None:
    for rank in range(ranks):
        share = share_of(units, rank, ranks)
        wide = share.scaled(factor)
        assert (wide.units, wide.size) == (units * factor, share.size * factor)
        assert set(wide.span) == {unit * factor + i for unit in share.span for i in range(factor)}


def test_an_empty_share_has_no_block() -> None:
    assert share_of(2, 4, 5) == Share(2, ()) == share_of(2, 2, 3)
    assert (share_of(2, 4, 5).size, share_of(2, 4, 5).local_blocks) == (0, ())


@quick
@given(head_counts(), RANKS)
def test_kv_heads(counts: tuple[int, int], ranks: int) -> None:
    heads, kv_heads = counts
    shares = [share_heads(heads, kv_heads, rank, ranks) for rank in range(ranks)]
    check_heads(heads, kv_heads, shares)


@quick
@given(head_counts(), st.data())
def test_kv_heads_with_blocks(counts: tuple[int, int], data: st.DataObject) -> None:
    heads, kv_heads = counts
    num_blocks = data.draw(st.integers(1, heads))
    ranks = data.draw(st.integers(1, num_blocks))
    check_heads(heads, kv_heads, [share_heads(heads, kv_heads, rank, ranks, num_blocks) for rank in range(ranks)])


def check_heads(heads: int, kv_heads: int, shares: list[HeadShare]) -> None:
    assert joined([share.query.span for share in shares]) == list(range(heads))
    assert joined([share.kv_owned for share in shares]) == list(range(kv_heads)), "each is owned once, in rank order"
    group_size = heads // kv_heads
    for share in shares:
        used = {head // group_size for head in share.query.span}
        assert set(share.kv) == used, "a rank holds the KV heads that its query heads use, and no other"
        assert set(share.kv_owned) <= set(share.kv)
        for kv in share.kv_owned:
            assert kv * group_size in share.query.span, "the owner has the first query head of the group"
        for local, head in enumerate(share.query.span):
            assert share.kv[share.kv_index(local)] == head // group_size
    shared = {kv for kv in range(kv_heads) if sum(kv in share.kv for share in shares) > 1}
    assert all(set(share.kv_shared) == shared for share in shares)


def test_the_example_of_9_heads_and_3_kv_heads_on_2_ranks() -> None:
    first, second = (share_heads(9, 3, rank, 2) for rank in range(2))
    assert (first.query.span, first.kv, first.kv_owned) == (range(0, 5), range(0, 2), range(0, 2))
    assert (second.query.span, second.kv, second.kv_owned) == (range(5, 9), range(1, 3), range(2, 3))
    assert first.kv_shared == second.kv_shared == (1,)


@quick
@given(head_counts(), RANKS)
def test_gradient_slots(counts: tuple[int, int], ranks: int) -> None:
    heads, kv_heads = counts
    shares = [share_heads(heads, kv_heads, rank, ranks) for rank in range(ranks)]
    slots = [KvReplicas.of(share, LibrarySum(SerialGroup())) for share in shares]
    for share, each in zip(shares, slots, strict=True):
        used = [slot for slot, _ in each.own] + [slot for _, own in each.shared for slot in own]
        assert sorted(used) == list(range(each.count)), "every slot has one use"
        assert sorted(set(each.index)) == list(range(each.count))
        assert len(each.shared) == len(share.kv_shared), "all ranks take part in the same sums"
    for i, kv in enumerate(shares[0].kv_shared):
        assert sum(len(each.shared[i][1]) for each in slots) == heads // kv_heads, f"KV head {kv}"


class NamedGroup(SerialGroup):
    """A place in a group of which nothing but rank and size is asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def builder(group: Group, num_blocks: int = 0) -> Builder:
    return Builder(make_site(group, dtype="float64", invariant_blocks=num_blocks), 0.02)


@quick
@given(head_counts(), st.integers(1, 3), st.data())
def test_blocks_of_the_fused_projection(counts: tuple[int, int], head_dim: int, data: st.DataObject) -> None:
    """Each local row is multiplied once; each global row counts for dx once, in an order that no rank count changes."""
    heads, kv_heads = counts
    num_blocks = data.draw(st.integers(0, heads))
    orders = set()
    for ranks in {data.draw(st.integers(1, num_blocks or 9)), data.draw(st.integers(1, num_blocks or 9))}:
        order: list[tuple[str, int]] = []
        for rank in range(ranks):
            build = builder(NamedGroup(rank, ranks), num_blocks)
            own, dropout = build.site.heads(heads, kv_heads), AttentionDropout(0.0, "a")
            qkv = build.attention(AttentionSizes(own, head_dim, 4, qkv_bias=True, out_bias=True), dropout).qkv
            placement = qkv.product.placement
            names = [(part.name, row) for part in placement.parts for row in part.held[0]]
            assert qkv.bias is not None
            assert [part.dims for part in qkv.bias.placement.parts] == [part.dims[:1] for part in placement.parts]
            assert sorted(row for block in qkv.blocks for row in range(block.start, block.stop)) == list(
                range(placement.shape[0])
            )
            order += [names[row] for block in qkv.dx_blocks for row in range(block.start, block.stop)]
        expected = {("q", row) for row in range(heads * head_dim)}
        expected |= {(part, row) for part in "kv" for row in range(kv_heads * head_dim)}
        assert len(order) == len(expected) and set(order) == expected
        orders.add(tuple(order))
    assert not num_blocks or len(orders) == 1


@quick
@given(UNITS, RANKS)
def test_every_row_of_a_parameter_is_owned_once(units: int, ranks: int) -> None:
    owned: dict[str, list[int]] = {}
    for rank in range(ranks):
        build = builder(NamedGroup(rank, ranks))
        for name, param in {
            **{"column": build.column(("gate", "up"), 3, build.site.share(units), bias=True).product.weight},
            **{"row": build.row("in", build.site.share(units), 3, bias=True).product.weight},
            **{"replicated": build.site.whole(units)},
        }.items():
            assert param.placement.shape == param.data.shape
            for part, place in param.placement.owned():
                dim = param.placement.fused
                assert place[dim].stop - place[dim].start == len(part.owned[dim])
                owned.setdefault(f"{name}/{part.name}", []).extend(part.owned[dim])
    assert set(owned) == {"column/gate", "column/up", "row/in", "replicated/"}
    assert all(rows == list(range(units)) for rows in owned.values())


@pytest.mark.parametrize(
    ("ranks", "num_blocks", "words"),
    [
        (3, 2, "2 blocks can't go to 3 ranks; use at most 2 ranks or set invariant_blocks to a number up to 5"),
        (6, 5, "5 blocks can't go to 6 ranks; use at most 5 ranks$"),
        (3, 6, "invariant_blocks=6 exceeds heads=5.*use a number from 3 to 5"),
        (6, 6, "at most 5 blocks .heads=5., fewer than the 6 ranks; use at most 5 ranks"),
        (1, 100, "invariant_blocks=100 exceeds heads=5.*from 1 to 5"),
    ],
)
def test_invariant_layouts_that_cannot_be(ranks: int, num_blocks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_site(NamedGroup(0, ranks), invariant_blocks=num_blocks).check_blocks(
            {"heads": 5, "ffn_hidden": 37, "vocab_size": 53}
        )


@pytest.mark.parametrize(("ranks", "num_blocks"), [(1, 0), (99, 0), (1, 1), (5, 5), (2, 3)])
def test_layouts_that_can_be(ranks: int, num_blocks: int) -> None:
    make_site(NamedGroup(0, ranks), invariant_blocks=num_blocks).check_blocks({"heads": 5, "ffn_hidden": 37})
