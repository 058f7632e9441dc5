"""What a group of ranks can do together; everything above `comm/` talks to this interface alone.

The kinds: `SerialGroup` (one rank, every collective is the identity), `ThreadGroup` (ranks are threads of one process:
tests, debugger, teaching), `MpiGroup` (mpi4py), and `NodeGroup` around it (sums in shared memory within a node).

Rules that hold for all kinds:

- Every rank of the group issues the same collectives in the same order. A decision that depends on data is taken on one
  rank and broadcast (`broadcast_object`) before it leads to a collective.
- No collective writes to its argument unless `out` names it: `all_reduce(x, out=x)` works in place. A one-rank group
  returns its argument itself, so treat a result as shared with the argument.
- Results are equal to the bit on all ranks of the group.
- Arrays live on whatever device they live on; staging through the host and stream synchronisation are the affair of
  the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line imports no NumPy
    from mpitp.backend.arrays import Array


class Pending:
    """A collective under way. `wait()` ends it and returns its array; the buffers stay alive until then.

    `test` tells whether `wait` would return at once; without one, that is known when it has been called only.
    """

    def __init__(self, wait: Callable[[], Array], test: Callable[[], bool] | None = None) -> None:
        self._wait: Callable[[], Array] | None = wait
        self._test = test
        self._result: Array = None

    @classmethod
    def done(cls, result: Array) -> Pending:
        """A collective that has already ended."""
        pending = cls(lambda: result)
        pending.wait()
        return pending

    def test(self) -> bool:
        """Whether `wait` would return at once, as far as is known. Moves on what can be moved on without waiting."""
        return self._wait is None or (self._test is not None and self._test())

    def wait(self) -> Array:
        """Block until the collective has ended; a second call returns the same array."""
        if self._wait is not None:
            self._result, self._wait = self._wait(), None
        return self._result


class Group(ABC):
    """Ranks 0 .. size-1 that communicate with one another; `rank` is this one's place."""

    rank: int
    size: int
    in_background: bool = False  # whether a large started sum moves on while the rank computes
    smallest_background_bytes: int = 0  # smaller ones are done at once

    @abstractmethod
    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        """Elementwise `op` ("sum", "max" or "min") of every rank's x, on every rank. Same shape and dtype everywhere.

        float16 and bfloat16 are summed in float32 and rounded once.
        """

    @abstractmethod
    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        """The sum of all ranks' partials, added strictly from left to right: rank 0's list, then rank 1's, ...

        The lists may differ in length (or be empty); `like` gives shape and dtype of one partial. The result is a new
        array that depends on the sequence of partials only, not on which rank held which: ((0 + p0) + p1) + p2 ...
        """

    @abstractmethod
    def all_gather(self, x: Array, dim: int = 0) -> Array:
        """Every rank's x joined along `dim` in rank order; sizes along `dim` may differ from rank to rank."""

    @abstractmethod
    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        """The sum of every rank's x, of which this rank gets its part: `sizes[r]` along `dim` go to rank r."""

    @abstractmethod
    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        """blocks[r] goes to rank r; entry r of the result came from rank r. Shapes may differ; dtypes may not."""

    @abstractmethod
    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Root's x on every rank. Every rank passes an array of the same shape and dtype; only root's values count."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Root's small Python object on every rank (pickled where ranks are processes)."""

    @abstractmethod
    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small Python object, in rank order, on every rank."""

    @abstractmethod
    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        """Hand x to rank `dest`, which must call `recv`."""

    @abstractmethod
    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        """A new array of the shape and dtype of `like`, sent by rank `source`."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def split(self, color: int, key: int) -> Group:
        """The group of the ranks that passed the same `color`, ordered by `key`."""

    def empty(self, shape: tuple[int, ...], dtype: Any, xp: Any) -> Array:
        """An uninitialised array of module `xp`, best placed to be the operand of the group's next `all_reduce`.

        Produce the operand straight into it. It is given away with the reduction: use the result, not the operand.
        """
        return xp.empty(shape, dtype)

    def wait_for(self, source: int, tag: int = 0) -> None:  # noqa: B027
        """Sleep until rank `source` has sent a message with this tag: `recv` may keep a core busy while it waits.

        Kinds whose `recv` sleeps return at once.
        """

    def start_all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Pending:
        """Start `all_reduce`; don't touch x or out before `wait()`. Kinds that can't overlap do it at once."""
        return Pending.done(self.all_reduce(x, op, out))

    def start_all_gather(self, x: Array, dim: int = 0) -> Pending:
        """Start `all_gather`."""
        return Pending.done(self.all_gather(x, dim))

    def start_reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Pending:
        """Start `reduce_scatter`."""
        return Pending.done(self.reduce_scatter(x, sizes, dim))

    def start_all_to_all(self, blocks: Sequence[Array], lengths: Sequence[int] | None = None) -> Pending:
        """Start `all_to_all`; `wait()` returns its list. Don't write to blocks before.

        `lengths`: how long along dim 0 what comes from each rank is, where that is known; all else is then alike in all
        blocks, and nobody has to ask.
        """
        return Pending.done(self.all_to_all(blocks))

    def start_send(self, x: Array, dest: int, tag: int = 0) -> Pending:
        """Start `send`; don't write to x before `wait()`, which returns x. Waits for nobody here."""
        self.send(x, dest, tag)
        return Pending.done(x)

    def start_recv(self, like: Array, source: int, tag: int = 0) -> Pending:
        """Start `recv`; `wait()` returns the array. Started in any order: tags tell which is which."""
        return Pending(lambda: self.recv(like, source, tag))


class ForwardingGroup(Group):
    """Hands every call on to `inner`: the base of a group that does a few collectives in a way of its own.

    Started collectives go through this group's own blocking ones (see `Group`), so that one that is done differently is
    so wherever layers use it; started messages go to `inner`.
    """

    def __init__(self, inner: Group) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        return self.inner.all_reduce(x, op, out)

    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        return self.inner.all_reduce_in_order(partials, like)

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        return self.inner.all_gather(x, dim)

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        return self.inner.reduce_scatter(x, sizes, dim)

    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        return self.inner.all_to_all(blocks)

    def broadcast(self, x: Array, root: int = 0) -> Array:
        return self.inner.broadcast(x, root)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.inner.broadcast_object(value, root)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self.inner.all_gather_objects(value)

    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        self.inner.send(x, dest, tag)

    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        return self.inner.recv(like, source, tag)

    def start_send(self, x: Array, dest: int, tag: int = 0) -> Pending:
        return self.inner.start_send(x, dest, tag)

    def start_recv(self, like: Array, source: int, tag: int = 0) -> Pending:
        return self.inner.start_recv(like, source, tag)

    def wait_for(self, source: int, tag: int = 0) -> None:
        self.inner.wait_for(source, tag)

    def barrier(self) -> None:
        self.inner.barrier()

    def split(self, color: int, key: int) -> Group:
        return self.inner.split(color, key)
