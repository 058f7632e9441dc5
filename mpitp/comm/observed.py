"""A group that stands in front of another one and shows every call to an observer: for watching, checking and tracing.

Layers hold a `Group` and don't know what kind; whoever wants to see the traffic puts one of these around it. Whoever
wants a collective done in another way writes a `ForwardingGroup` (`group.py`).
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.comm.group import Group, Pending

_HERE = str(Path(__file__).parent) + os.sep
SITE_FRAMES = 3  # frames of a call site that are told

Arrays = tuple[Array, ...]


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


class GroupObserver(ABC):
    """Sees every call of one rank. `arrays`: what the rank hands in."""

    @abstractmethod
    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        """Do `run()` and return what it returns, with whatever is to happen before and after."""

    def around_start(self, call: Call, arrays: Arrays, group: ObservedGroup, start: Callable[[], Pending]) -> Pending:
        """Do `start()` and return what it returns, or a Pending that stands for it: here two calls, start and wait."""
        beginning, waiting = replace(call, op=f"start {call.op}"), replace(call, op=f"wait {call.op}")
        pending = self.around_collective(beginning, arrays, group, start)
        return Pending(lambda: self.around_collective(waiting, (), group, pending.wait), pending.test)


class ObservedGroup(Group):
    """Hands every call on to `inner`, through the observer; so do groups that are split off.

    `name` tells which ranks it joins; `members`: their numbers in the group that was observed first (None: it is that
    one). `whole_sums`: no sum is cut into pieces to move on while the rank computes.
    """

    def __init__(self, inner: Group, observer: GroupObserver, name: str = "", *, whole_sums: bool = False) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.observer, self.name = observer, name
        self.in_background = inner.in_background and not whole_sums
        self.members: list[int] | None = None
        self._whole_sums = whole_sums

    def empty(self, shape: tuple[int, ...], dtype: Any, xp: Any) -> Array:
        return self.inner.empty(shape, dtype, xp)

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        return self._seen(_call("all_reduce", x, op), (x,), lambda: self.inner.all_reduce(x, op, out))

    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        call = _call("all_reduce_in_order", like, "sum")
        return self._seen(call, tuple(partials), lambda: self.inner.all_reduce_in_order(partials, like))

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        return self._seen(_gather_call(x, dim), (x,), lambda: self.inner.all_gather(x, dim))

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        return self._seen(_scatter_call(x, sizes, dim), (x,), lambda: self.inner.reduce_scatter(x, sizes, dim))

    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        return self._seen(_blocks_call(blocks), tuple(blocks), lambda: self.inner.all_to_all(blocks))

    def broadcast(self, x: Array, root: int = 0) -> Array:
        return self._seen(_call("broadcast", x, f"root {root}"), (x,), lambda: self.inner.broadcast(x, root))

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        call = Call("broadcast_object", (), "", f"root {root}")
        return self._seen(call, (), lambda: self.inner.broadcast_object(value, root))

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._seen(Call("all_gather_objects", (), ""), (), lambda: self.inner.all_gather_objects(value))

    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        self._seen(_message("send", x, dest, tag), (x,), lambda: self.inner.send(x, dest, tag))

    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        return self._seen(_message("recv", like, source, tag), (like,), lambda: self.inner.recv(like, source, tag))

    def wait_for(self, source: int, tag: int = 0) -> None:
        self.inner.wait_for(source, tag)

    def barrier(self) -> None:
        self._seen(Call("barrier", (), ""), (), self.inner.barrier)

    def split(self, color: int, key: int) -> Group:
        inner = self._seen(Call("split", (), ""), (), lambda: self.inner.split(color, key))
        number = self.rank if self.members is None else self.members[self.rank]
        members = inner.all_gather_objects(number)
        name = f"{self.name}/{ranks_in_words(members)}"
        part = ObservedGroup(inner, self.observer, name, whole_sums=self._whole_sums)
        part.members = members
        return part

    def start_all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Pending:
        return self._started(_call("all_reduce", x, op), x, lambda: self.inner.start_all_reduce(x, op, out))

    def start_all_gather(self, x: Array, dim: int = 0) -> Pending:
        return self._started(_gather_call(x, dim), x, lambda: self.inner.start_all_gather(x, dim))

    def start_reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Pending:
        call = _scatter_call(x, sizes, dim)
        return self._started(call, x, lambda: self.inner.start_reduce_scatter(x, sizes, dim))

    def start_all_to_all(self, blocks: Sequence[Array], lengths: Sequence[int] | None = None) -> Pending:
        def start() -> Pending:
            return self.inner.start_all_to_all(blocks, lengths)

        return self.observer.around_start(_blocks_call(blocks), tuple(blocks), self, start)

    def start_send(self, x: Array, dest: int, tag: int = 0) -> Pending:
        return self._started(_message("send", x, dest, tag), x, lambda: self.inner.start_send(x, dest, tag))

    def start_recv(self, like: Array, source: int, tag: int = 0) -> Pending:
        call = _message("recv", like, source, tag)
        return self._started(call, like, lambda: self.inner.start_recv(like, source, tag))

    def _seen(self, call: Call, arrays: Arrays, run: Callable[[], Any]) -> Any:
        return self.observer.around_collective(call, arrays, self, run)

    def _started(self, call: Call, x: Array, start: Callable[[], Pending]) -> Pending:
        return self.observer.around_start(call, (x,), self, start)


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


def _message(op: str, x: Array, peer: int, tag: int) -> Call:
    """A send or a receive; the tag is told where there is one."""
    way = "to" if op == "send" else "from"
    return _call(op, x, f"{way} {peer}" + (f" tag {tag}" if tag else ""))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Such as: ranks 0, 2."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _call(op: str, x: Array, detail: str) -> Call:
    return Call(op, tuple(x.shape), str(x.dtype), detail)


def _blocks_call(blocks: Sequence[Array]) -> Call:
    return Call("all_to_all", (len(blocks),), str(blocks[0].dtype))


def _scatter_call(x: Array, sizes: Sequence[int], dim: int) -> Call:
    return _call("reduce_scatter", x, f"dim {dim}, sizes {list(sizes)}")


def _gather_call(x: Array, dim: int) -> Call:
    return replace(_call("all_gather", x, f"dim {dim}"), free_dim=dim % x.ndim)
