"""Ranks as threads of one process: for unit tests, for a debugger that sees all ranks at once, for teaching.

Each collective is a meeting: every rank puts its argument on the table, all wait, every rank works out its own result
from the whole table, all wait again before the table is cleared. Ranks that come to a meeting for different
collectives, shapes or dtypes get an error that says who asked for what. When a rank fails, all meetings break at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.comm.frames import frame_of
from mpitp.comm.group import Group
from mpitp.comm.reductions import cut, reduction, sum_in_order
from mpitp.comm.serial import SerialGroup

DEFAULT_TIMEOUT_SECONDS = 60.0  # for which all ranks may wait for one another


class BrokenGroup(RuntimeError):
    """Another rank has failed or the time was up, so that this collective can't end."""


class _Job:
    """All that the ranks of one `run_threads` share: whether one has failed, and what then has to be woken."""

    def __init__(self) -> None:
        self.broken = False
        self._lock = threading.Lock()
        self._tables: list[_Table] = []

    def table(self, size: int) -> _Table:
        table = _Table(self, size)
        with self._lock:
            self._tables.append(table)
        if self.broken:
            table.wake()
        return table

    def fail(self) -> None:
        self.broken = True
        with self._lock:
            tables = list(self._tables)
        for table in tables:
            table.wake()


class _Table:
    """Where the ranks of one group meet, and their letter boxes."""

    def __init__(self, job: _Job, size: int) -> None:
        self.job = job
        self.size = size
        self._barrier = threading.Barrier(size)
        self._places: list[Any] = [None] * size
        self._letters: defaultdict[tuple[int, int, int], deque[Array]] = defaultdict(deque)  # (source, dest, tag)
        self._arrival = threading.Condition()

    def wake(self) -> None:
        self._barrier.abort()
        with self._arrival:
            self._arrival.notify_all()

    def meet(self) -> None:
        try:
            with _waiting():
                self._barrier.wait()
        except threading.BrokenBarrierError:
            raise BrokenGroup("the collective broke: another rank failed or the time was up") from None

    def exchange(self, rank: int, what: str, value: Any, use: Callable[[list[Any]], Any]) -> Any:
        """Put `value` on the table, and return `use(all values)`. `what` must be the same text on every rank."""
        self._places[rank] = (what, value)
        self.meet()
        places = list(self._places)
        calls = [place[0] for place in places]
        if any(call != calls[0] for call in calls):
            listed = "; ".join(f"rank {r}: {call}" for r, call in enumerate(calls))
            raise RuntimeError(f"the ranks called different collectives: {listed}")
        result = use([place[1] for place in places])
        self.meet()
        return result

    def put(self, source: int, dest: int, tag: int, x: Array) -> None:
        with self._arrival:
            self._letters[source, dest, tag].append(x.copy())
            self._arrival.notify_all()

    def take(self, source: int, dest: int, tag: int) -> Array:
        box = self._letters[source, dest, tag]
        with self._arrival:
            with _waiting():
                self._arrival.wait_for(lambda: box or self.job.broken)
            if not box:
                raise BrokenGroup(
                    f"recv from rank {source} with tag {tag} broke: another rank failed or the time was up"
                )
            return box.popleft()


class ThreadGroup(Group):
    """One rank's view of a group of threads; made by `run_threads`."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank = rank
        self.size = table.size
        self._table = table

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        apply = reduction(op, array_module(x))

        def combine(xs: list[Array]) -> Array:
            total = xs[0].astype(wide_dtype(x.dtype), copy=True)
            for other in xs[1:]:
                apply(total, other.astype(total.dtype, copy=False), out=total)
            return total.astype(x.dtype, copy=False)

        result = self._exchange(f"all_reduce {op} {_like(x)}", x, combine)
        if out is None:
            return result
        out[...] = result
        return out

    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        def add_all(lists: list[Sequence[Array]]) -> Array:
            return sum_in_order((partial for each in lists for partial in each), like)

        return self._exchange(f"all_reduce_in_order {_like(like)}", partials, add_all)

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        dim = dim % x.ndim
        rest = x.shape[:dim] + x.shape[dim + 1 :]
        join = array_module(x).concatenate
        return self._exchange(f"all_gather dim {dim} {rest} {x.dtype}", x, lambda xs: join(xs, axis=dim))

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        def combine(xs: list[Array]) -> Array:
            pieces = [cut(each, sizes, dim)[self.rank] for each in xs]
            return sum_in_order(pieces, pieces[0])

        return self._exchange(f"reduce_scatter {list(sizes)} dim {dim} {_like(x)}", x, combine)

    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        assert len(blocks) == self.size, f"all_to_all needs {self.size} blocks, got {len(blocks)}"
        return self._exchange("all_to_all", blocks, lambda rows: [row[self.rank].copy() for row in rows])

    def broadcast(self, x: Array, root: int = 0) -> Array:
        def use(xs: list[Array]) -> Array:
            return x if self.rank == root else xs[root].copy()

        return self._exchange(f"broadcast from {root} {_like(x)}", x, use)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._exchange(f"broadcast_object from {root}", value, lambda values: values[root])

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._exchange("all_gather_objects", value, list)

    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        assert 0 <= dest < self.size, f"the group has no rank {dest}"
        self._table.put(self.rank, dest, tag, x)

    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        assert 0 <= source < self.size, f"the group has no rank {source}"
        letter = self._table.take(source, self.rank, tag)
        if _like(letter) != _like(like):
            raise RuntimeError(f"recv expected {_like(like)}, rank {source} sent {_like(letter)}")
        return letter

    def barrier(self) -> None:
        self._exchange("barrier", None, list)

    def split(self, color: int, key: int) -> Group:
        asked = self._exchange("split", (color, key), list)
        members = sorted((k, r) for r, (c, k) in enumerate(asked) if c == color)
        ranks = [r for _, r in members]
        # The first member lays the new table; the others learn of it in one more meeting, which all must come to.
        is_first = self.rank == ranks[0] and len(ranks) > 1
        tables = self._exchange("split (tables)", self._table.job.table(len(ranks)) if is_first else None, list)
        return ThreadGroup(ranks.index(self.rank), tables[ranks[0]]) if len(ranks) > 1 else SerialGroup()

    def _exchange(self, what: str, value: Any, use: Callable[[list[Any]], Any]) -> Any:
        return self._table.exchange(self.rank, what, value, use)


def _like(x: Array) -> str:
    return f"{tuple(x.shape)} {x.dtype}"


def run_threads(size: int, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> list[Any]:
    """Run `fn(group, *args)` on `size` ranks, each a thread, and return their results in rank order.

    An exception on one rank breaks the others' collectives at once and is raised here with a note that names the rank.
    When all ranks that haven't ended wait for one another for longer than `timeout` seconds, TimeoutError says where
    each of them stands; while one of them works, or is held by a debugger, there is no limit. One rank runs in the
    calling thread, with a `SerialGroup`.
    """
    if size == 1:
        return [fn(SerialGroup(), *args)]
    job = _Job()
    table = job.table(size)
    ranks = [_Rank(ThreadGroup(rank, table), job, fn, args) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        _join_all(ranks, job, timeout)
    except KeyboardInterrupt:  # it comes to this thread alone: the ranks end where they next wait for one another
        _let_go(ranks, job)
        raise
    failures = sorted((rank.failed_at, rank.group.rank) for rank in ranks if rank.error is not None)
    if failures:
        _raise_first([ranks[number] for _, number in failures], size)
    return [rank.result for rank in ranks]


class _Rank(threading.Thread):
    """The thread of one rank. It inherits the caller's context, and so `numpy.errstate`."""

    def __init__(self, group: ThreadGroup, job: _Job, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(name=f"rank {group.rank}", daemon=True)
        self.group, self.job, self.fn, self.args = group, job, fn, args
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.failed_at = 0.0
        self.waits_since: float | None = None  # for other ranks; None: it works

    def run(self) -> None:
        try:
            self.result = self.context.run(self.fn, self.group, *self.args)
        except BaseException as error:  # whatever ended this rank must end the others
            self.error, self.failed_at = error, time.monotonic()
            self.job.fail()


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Marks the rank of this thread as one that waits for others."""
    rank = threading.current_thread()
    if not isinstance(rank, _Rank):
        yield
        return
    rank.waits_since = time.monotonic()
    try:
        yield
    finally:
        rank.waits_since = None


def _is_stuck(rank: _Rank, timeout: float) -> bool:
    since = rank.waits_since
    return since is not None and time.monotonic() - since > timeout


def _is_debugged() -> bool:
    """Whether someone steps through this program: a debugger holds ranks for as long as it likes."""
    return sys.gettrace() is not None or threading.gettrace() is not None


def _join_all(ranks: list[_Rank], job: _Job, timeout: float) -> None:
    """Wait for the ranks to end. Raises TimeoutError when those that are left wait for one another only."""
    while stuck := [rank for rank in ranks if rank.is_alive()]:
        if all(_is_stuck(rank, timeout) for rank in stuck) and not _is_debugged():
            _give_up(ranks, stuck, job, timeout)
        stuck[0].join(min(timeout / 4, 0.5))


def _give_up(ranks: list[_Rank], stuck: list[_Rank], job: _Job, timeout: float) -> None:
    places = "".join(_where(rank) for rank in stuck)
    _let_go(stuck, job)
    raise TimeoutError(
        f"{len(stuck)} of {len(ranks)} ranks had not ended after {timeout:g} s of waiting for one another{places}"
    )


def _let_go(ranks: list[_Rank], job: _Job) -> None:
    """Break all meetings, and wait a little for the ranks to notice."""
    job.fail()
    for rank in ranks:
        rank.join(1.0)


def _where(rank: _Rank) -> str:
    frame = frame_of(rank.ident)
    stack = [entry for entry in traceback.extract_stack(frame) if entry.filename != threading.__file__]
    return f"\n{rank.name} stands at:\n{''.join(traceback.format_list(stack[-6:]))}"


def _raise_first(failed: list[_Rank], size: int) -> None:
    """Raise what came first; a collective that broke because of another rank's failure tells nothing."""
    causes = [rank for rank in failed if not isinstance(rank.error, BrokenGroup)]
    first = (causes or failed)[0]
    assert first.error is not None
    first.error.add_note(f"raised on rank {first.group.rank} of {size}")
    raise first.error
