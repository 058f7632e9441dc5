"""A group that stands in front of another one and sees every call: the base of watching, checking and tracing.

Layers hold a `Group` and don't know what kind; whoever wants to see the traffic puts one of these around it.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from mpitp.comm.group import Array, Group, Pending

_HERE = str(Path(__file__).parent) + os.sep
SITE_FRAMES = 3  # frames of a call site that are told


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as a rank sees it. `wait` calls end what a `start` call began."""

    op: str  # all_reduce, start all_reduce, wait all_reduce, ...
    shape: tuple[int, ...]
    dtype: str
    detail: str = ""  # the reduction, the root, the dim
    free_dim: int | None = None  # the dim whose length may differ from rank to rank

    def __str__(self) -> str:
        what = f"{self.op}({self.detail})" if self.detail else self.op
        return f"{what} {list(self.shape)} {self.dtype}".rstrip()


class WrappedGroup(Group):
    """Hands every call on to `inner`, through `_around`."""

    def __init__(self, inner: Group) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.in_background = inner.in_background

    @abstractmethod
    def _around(self, call: Call, run: Callable[[], Any]) -> Any:
        """Do `run()` and return what it returns, with whatever is to happen before and after."""

    @abstractmethod
    def _wrap_split(self, inner: Group) -> Group:
        """What stands in front of a group that was split off."""

    def empty(self, shape: tuple[int, ...], dtype: Any, xp: Any) -> Array:
        return self.inner.empty(shape, dtype, xp)

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        return self._around(_call("all_reduce", x, op), lambda: self.inner.all_reduce(x, op, out))

    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        call = _call("all_reduce_in_order", like)
        return self._around(call, lambda: self.inner.all_reduce_in_order(partials, like))

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        return self._around(_gather_call(x, dim), lambda: self.inner.all_gather(x, dim))

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        call = _call("reduce_scatter", x, f"dim {dim}, sizes {list(sizes)}")
        return self._around(call, lambda: self.inner.reduce_scatter(x, sizes, dim))

    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        call = Call("all_to_all", (len(blocks),), str(blocks[0].dtype))
        return self._around(call, lambda: self.inner.all_to_all(blocks))

    def broadcast(self, x: Array, root: int = 0) -> Array:
        return self._around(_call("broadcast", x, f"root {root}"), lambda: self.inner.broadcast(x, root))

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        call = Call("broadcast_object", (), "", f"root {root}")
        return self._around(call, lambda: self.inner.broadcast_object(value, root))

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._around(Call("all_gather_objects", (), ""), lambda: self.inner.all_gather_objects(value))

    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        self._around(_call("send", x, f"to {dest}"), lambda: self.inner.send(x, dest, tag))

    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        return self._around(_call("recv", like, f"from {source}"), lambda: self.inner.recv(like, source, tag))

    def barrier(self) -> None:
        self._around(Call("barrier", (), ""), self.inner.barrier)

    def split(self, color: int, key: int) -> Group:
        return self._wrap_split(self._around(Call("split", (), ""), lambda: self.inner.split(color, key)))

    def start_all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Pending:
        return self._started(_call("all_reduce", x, op), lambda: self.inner.start_all_reduce(x, op, out))

    def start_all_gather(self, x: Array, dim: int = 0) -> Pending:
        return self._started(_gather_call(x, dim), lambda: self.inner.start_all_gather(x, dim))

    def start_reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Pending:
        call = _call("reduce_scatter", x, f"dim {dim}, sizes {list(sizes)}")
        return self._started(call, lambda: self.inner.start_reduce_scatter(x, sizes, dim))

    def _started(self, call: Call, start: Callable[[], Pending]) -> Pending:
        pending = self._around(replace(call, op=f"start {call.op}"), start)
        waiting = replace(call, op=f"wait {call.op}")
        return Pending(lambda: self._around(waiting, pending.wait))


def call_site() -> str:
    """File, line and function of the code outside `comm/` that made the current call, and whence that was called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return place_of(frame)


def place_of(frame: FrameType | None) -> str:
    """The innermost frames from this one on: "layers/mappings.py:31 in forward < layers/block.py:52 in forward"."""
    places: list[str] = []
    while frame is not None and len(places) < SITE_FRAMES:
        places.append(_place(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return " < ".join(places)


@lru_cache(maxsize=4096)
def _place(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{line} in {code.co_name}"


def _call(op: str, x: Array, detail: str = "") -> Call:
    return Call(op, tuple(x.shape), str(x.dtype), detail)


def _gather_call(x: Array, dim: int) -> Call:
    return replace(_call("all_gather", x, f"dim {dim}"), free_dim=dim % x.ndim)
