"""A group that shows every collective, and the arrays that go into it, to an observer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mpitp.comm.group import Array, Group, Pending
from mpitp.comm.wrapped import Call, WrappedGroup

Arrays = tuple[Array, ...]


class GroupObserver(ABC):
    """Sees every collective of one rank."""

    @abstractmethod
    def around_collective(self, call: Call, arrays: Arrays, group: TracedGroup, run: Callable[[], Any]) -> Any:
        """Do `run()` and return what it returns. `arrays`: what this rank hands in."""

    @abstractmethod
    def around_start(self, call: Call, arrays: Arrays, group: TracedGroup, start: Callable[[], Pending]) -> Pending:
        """Do `start()` and return what it returns, or a Pending that stands for it."""


class TracedGroup(WrappedGroup):
    """Hands every call on to `inner`, through the observer. `name` tells which ranks it joins."""

    def __init__(self, inner: Group, observer: GroupObserver, name: str) -> None:
        super().__init__(inner)
        self.observer, self.name = observer, name
        self.in_background = False  # each sum whole, as the ledger's closed form counts them

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        return self._seen(_call("all_reduce", x, op), (x,), lambda: self.inner.all_reduce(x, op, out))

    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        call = _call("all_reduce_in_order", like, "sum")
        return self._seen(call, tuple(partials), lambda: self.inner.all_reduce_in_order(partials, like))

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        return self._seen(_call("all_gather", x, f"dim {dim}"), (x,), lambda: self.inner.all_gather(x, dim))

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        call = _call("reduce_scatter", x, f"dim {dim}")
        return self._seen(call, (x,), lambda: self.inner.reduce_scatter(x, sizes, dim))

    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        call = Call("all_to_all", (len(blocks),), str(blocks[0].dtype))
        return self._seen(call, tuple(blocks), lambda: self.inner.all_to_all(blocks))

    def broadcast(self, x: Array, root: int = 0) -> Array:
        return self._seen(_call("broadcast", x, f"root {root}"), (x,), lambda: self.inner.broadcast(x, root))

    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        self._seen(_call("send", x, f"to {dest}"), (x,), lambda: self.inner.send(x, dest, tag))

    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        return self._seen(_call("recv", like, f"from {source}"), (like,), lambda: self.inner.recv(like, source, tag))

    def start_all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Pending:
        call = _call("all_reduce", x, op)
        return self.observer.around_start(call, (x,), self, lambda: self.inner.start_all_reduce(x, op, out))

    def start_all_gather(self, x: Array, dim: int = 0) -> Pending:
        call = _call("all_gather", x, f"dim {dim}")
        return self.observer.around_start(call, (x,), self, lambda: self.inner.start_all_gather(x, dim))

    def start_reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Pending:
        call = _call("reduce_scatter", x, f"dim {dim}")
        return self.observer.around_start(call, (x,), self, lambda: self.inner.start_reduce_scatter(x, sizes, dim))

    def _seen(self, call: Call, arrays: Arrays, run: Callable[[], Any]) -> Any:
        return self.observer.around_collective(call, arrays, self, run)

    def _around(self, call: Call, run: Callable[[], Any]) -> Any:
        """What carries no arrays."""
        return self._seen(call, (), run)

    def _wrap_split(self, inner: Group) -> Group:
        members = inner.all_gather_objects(self.rank)
        return TracedGroup(inner, self.observer, f"ranks {', '.join(map(str, members))} of {self.name}")


def _call(op: str, x: Array, detail: str) -> Call:
    return Call(op, tuple(x.shape), str(x.dtype), detail)
