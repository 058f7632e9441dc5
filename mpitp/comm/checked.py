"""Compares what every rank is about to do before it does it: a mismatch is an error with both call sites, not a hang.

Before each collective the ranks gather operation, shape, dtype and call site. That costs a small collective for each
one, so it is for looking for a fault: `--debug-collectives`. The call sites must be equal too: a rank that skips one of
several equal collectives is found at the next one, not where the order at last differs in kind.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from mpitp.comm.group import Group
from mpitp.comm.wrapped import Call, WrappedGroup, call_site
from mpitp.errors import LaunchError

_POINT_TO_POINT = ("send", "recv")  # these concern two ranks only


class CheckedGroup(WrappedGroup):
    """Every collective is preceded by a comparison of all ranks' calls. Raises LaunchError on every rank."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self._count = 0

    def _around(self, call: Call, run: Callable[[], Any]) -> Any:
        if call.op not in _POINT_TO_POINT and not call.op.startswith("wait "):
            self._count += 1
            self._compare(self.inner.all_gather_objects((call, call_site(), socket.gethostname())))
        return run()

    def _wrap_split(self, inner: Group) -> Group:
        return CheckedGroup(inner)

    def _compare(self, calls: list[tuple[Call, str, str]]) -> None:
        first = calls[0]
        for rank, other in enumerate(calls):
            if _comparable(other) != _comparable(first):
                raise LaunchError(
                    f"collective {self._count} differs between ranks:\n  {_told(0, first)}\n  {_told(rank, other)}"
                )


def _comparable(told: tuple[Call, str, str]) -> tuple[Any, ...]:
    call, site, _ = told
    shape = tuple(-1 if dim == call.free_dim else length for dim, length in enumerate(call.shape))
    return call.op, shape, call.dtype, call.detail, site


def _told(rank: int, told: tuple[Call, str, str]) -> str:
    call, site, host = told
    return f"rank {rank} on {host} calls {call} at {site}"
