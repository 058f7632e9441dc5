"""Compares what every rank is about to do before it does it: a mismatch is an error with both call sites, not a hang.

Before each collective the ranks gather operation, shape, dtype and call site. That costs a small collective for each
one, so it is for looking for a fault: `--debug-collectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitp.comm.group import Group
from mpitp.comm.wrapped import Call, WrappedGroup, call_site
from mpitp.errors import LaunchError

# These concern two ranks only, and their shapes may differ from rank to rank.
_POINT_TO_POINT = ("send", "recv")
_RAGGED = ("all_gather", "all_to_all")


class CheckedGroup(WrappedGroup):
    """Every collective is preceded by a comparison of all ranks' calls. Raises LaunchError on every rank."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self._count = 0

    def _around(self, call: Call, run: Callable[[], Any]) -> Any:
        if call.op not in _POINT_TO_POINT and not call.op.startswith("wait "):
            self._count += 1
            calls = self.inner.all_gather_objects((call, call_site()))
            self._compare(calls)
        return run()

    def _wrap_split(self, inner: Group) -> Group:
        return CheckedGroup(inner)

    def _compare(self, calls: list[tuple[Call, str]]) -> None:
        first, first_site = calls[0]
        for rank, (call, site) in enumerate(calls):
            if _comparable(call) != _comparable(first):
                raise LaunchError(
                    f"collective {self._count} differs between ranks: rank 0 calls {first} at {first_site}, "
                    f"rank {rank} calls {call} at {site}"
                )


def _comparable(call: Call) -> tuple[Any, ...]:
    op = call.op.removeprefix("start ")
    shape = len(call.shape) if op in _RAGGED else call.shape
    return op, call.op, shape, call.dtype, call.detail
