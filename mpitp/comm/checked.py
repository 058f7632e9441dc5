"""Compares what every rank is about to do before it does it: a mismatch is an error with both call sites, not a hang.

Before each collective the ranks gather operation, shape, dtype and call site. That costs a small collective for each
one, so it is for looking for a fault: `--debug-collectives`. The call sites must be equal too: a rank that skips one of
several equal collectives is found at the next one, not where the order at last differs in kind.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from mpitp.comm.group import Group
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup, call_site
from mpitp.errors import LaunchError

_POINT_TO_POINT = ("send", "recv", "start send", "start recv")  # these concern two ranks only


def checked(inner: Group) -> Group:
    """`inner`, every collective preceded by a comparison of all ranks' calls. Raises LaunchError on every rank."""
    return ObservedGroup(inner, _Comparison())


class _Comparison(GroupObserver):
    def __init__(self) -> None:
        self._counts: Counter[Group] = Counter()

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        if call.op not in _POINT_TO_POINT and not call.op.startswith("wait "):
            self._counts[group] += 1
            calls = group.inner.all_gather_objects((call, call_site(), socket.gethostname()))
            _compare(self._counts[group], calls)
        return run()


def _compare(count: int, calls: list[tuple[Call, str, str]]) -> None:
    first = calls[0]
    for rank, other in enumerate(calls):
        if _comparable(other) != _comparable(first):
            raise LaunchError(f"collective {count} differs between ranks:\n  {_told(0, first)}\n  {_told(rank, other)}")


def _comparable(told: tuple[Call, str, str]) -> tuple[Any, ...]:
    call, site, _ = told
    shape = tuple(-1 if dim == call.free_dim else length for dim, length in enumerate(call.shape))
    return call.op, shape, call.dtype, call.detail, site


def _told(rank: int, told: tuple[Call, str, str]) -> str:
    call, site, host = told
    return f"rank {rank} on {host} calls {call} at {site}"
