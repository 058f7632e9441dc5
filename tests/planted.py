"""Faults planted below the layers, to show that the comparisons with one rank turn red.

Also a pytest plugin: `MPITP_PLANTED="name" python -m pytest -p tests.planted ...` runs any tests with a fault in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import mpitp.layers.site
from mpitp.comm import MpiGroup, Pending, ThreadGroup
from mpitp.comm.reductions import sum_in_order
from mpitp.comm.small_sums import SmallSums
from mpitp.layers.partition import HeadShare, Share, share_heads

VARIABLE = "MPITP_PLANTED"


def local_all_reduce(patch: pytest.MonkeyPatch) -> None:
    def local(group: Any, x: Any, op: str = "sum", out: Any = None) -> Any:
        if out is None or out is x:
            return x
        out[...] = x
        return out

    for kind in (ThreadGroup, MpiGroup):
        patch.setattr(kind, "all_reduce", local)
        patch.setattr(kind, "start_all_reduce", lambda *args, **options: Pending.done(local(*args, **options)))
    patch.setattr(SmallSums, "add", local)  # how a node's ranks make the small ones


def local_sum_in_order(patch: pytest.MonkeyPatch) -> None:
    def local(group: Any, partials: Sequence[Any], like: Any) -> Any:
        return sum_in_order(partials, like)

    for kind in (ThreadGroup, MpiGroup):
        patch.setattr(kind, "all_reduce_in_order", local)


def _other_heads(patch: pytest.MonkeyPatch, change: Callable[[HeadShare, int, int], HeadShare]) -> None:
    def wrong(heads: int, kv_heads: int, rank: int, ranks: int, *how: Any) -> HeadShare:
        return change(share_heads(heads, kv_heads, rank, ranks, *how), rank, ranks)

    patch.setattr(mpitp.layers.site, "share_heads", wrong)


def _with_query(own: HeadShare, start: int, stop: int) -> HeadShare:
    kv = range(start // own.group_size, (stop - 1) // own.group_size + 1)
    return replace(own, query=Share(own.query.units, (range(start, stop),)), kv=kv)


def head_on_two_ranks(patch: pytest.MonkeyPatch) -> None:
    def early(own: HeadShare, rank: int, ranks: int) -> HeadShare:
        return own if rank == 0 else _with_query(own, own.query.span.start - 1, own.query.span.stop)

    _other_heads(patch, early)


def head_on_no_rank(patch: pytest.MonkeyPatch) -> None:
    def short(own: HeadShare, rank: int, ranks: int) -> HeadShare:
        return own if rank < ranks - 1 else _with_query(own, own.query.span.start, own.query.span.stop - 1)

    _other_heads(patch, short)


def heads_counted_from_the_ranks_own_first(patch: pytest.MonkeyPatch) -> None:
    """The map from query heads to KV heads of rank 0, used on every rank: right when heads divide evenly."""
    patch.setattr(HeadShare, "kv_index", lambda own, head: min(head // own.group_size, len(own.kv) - 1))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "all-reduce returns the local value": local_all_reduce,
    "sum in order leaves out the other ranks": local_sum_in_order,
    "head on two ranks": head_on_two_ranks,
    "head on no rank": head_on_no_rank,
    "KV heads counted from the rank's own first head": heads_counted_from_the_ranks_own_first,
}


def pytest_configure(config: pytest.Config) -> None:
    FAULTS[os.environ[VARIABLE]](pytest.MonkeyPatch())
