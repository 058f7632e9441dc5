r"""Sums through the shared memory of a node, everything else through the library.

    rank r                                    operand n lies in slot n mod 3 of r's part of the window
      produce x_r in the window               (`empty`), or copy it there
      tell ready = n
      ... independent work ...
      wait until every rank of the node is ready
      y = x_0 + x_1 + ... + x_{p-1}           read from all windows, in rank order: the same bits on every rank
      tell done = n                           slot n mod 3 may be written again when all are done with n

Two ranks read both operands. More ranks sum a slice each into the window and then read the whole
(`SLICED_FROM_BYTES`). Over several nodes each rank exchanges the slice that it has summed with its peers on the other
nodes in between. No rank copies its operand when it was produced in the window, and on one node nothing has to make
progress behind the scenes: between `start` and `wait` the memory simply lies there. Over several nodes the sum goes in
steps that the progress thread takes while the rank computes (`progress.py`). A reduce-scatter is the same without the
copying of the whole: each rank sums its own part of the windows. `node_gather.py` has the all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.backend.threads import affinity_cores
from mpitp.comm.group import ForwardingGroup, Group, Pending
from mpitp.comm.node_gather import NodeGather
from mpitp.comm.progress import Need, Steps, Stepwise, progress, run_to_end
from mpitp.comm.reductions import check_op, cut, reduction, stretches
from mpitp.comm.shared_memory import SharedMemory, map_shared, orders_stores
from mpitp.comm.small_sums import SmallSums

READY, SUMMED, DONE = 0, 1, 2  # the counters
SLOTS = 3
FIRST_SLOT_BYTES = 1 << 20
LARGEST_BYTES = 1 << 26  # larger operands go through the library
SMALLEST_BYTES = 1 << 13  # smaller ones have a way of their own (`small_sums.py`), over several nodes the library's
SCATTERED_TIMES = 4  # a reduce-scatter, which copies in, pays from so many times these on
SLICED_FROM_BYTES = 1 << 16
CACHED_ELEMENTS = 1 << 15
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class NodeGroup(ForwardingGroup):
    """A group that sums within a node through shared memory. `inner` does what shared memory isn't used for.

    `node`: this rank's group of its own node (None: all ranks are on one). `across`: the ranks that have the same place
    on their nodes; every node must have as many ranks. `spin`: whether a rank that waits keeps its core for a while;
    None: where there is a core for each rank of the group.
    """

    def __init__(
        self,
        inner: Group,
        node: Group | None = None,
        across: Group | None = None,
        *,
        smallest_bytes: int = SMALLEST_BYTES,
        largest_bytes: int = LARGEST_BYTES,
        spin: bool | None = None,
    ) -> None:
        super().__init__(inner)
        self.node, self.across = node or inner, across
        self.in_background = inner.in_background and across is not None
        if across is not None:
            across.smallest_background_bytes = 0  # the progress thread starts these sums, and nothing may block there
        self._bounds = (smallest_bytes, largest_bytes)
        self._spin = has_core_for_each(self.node) if spin is None else spin
        self._memory: SharedMemory | None = None
        self._failed = False
        self._count = 0  # sums started in this memory
        self._pending: dict[int, Pending] = {}
        self._lent: int | None = None  # number of the sum whose slot was given out by `empty`
        self._gather = NodeGather(self._map, inner.all_gather, largest_bytes)
        self._small_sums = SmallSums(lambda slots: self._shared(slots, smallest_bytes), self.node.size)

    def empty(self, shape: tuple[int, ...], dtype: Any, xp: Any = np) -> Array:
        """An array in the window, when it can be the operand of the next sum; else in ordinary memory."""
        dtype = np.dtype(dtype)
        size = prod(shape)
        memory = self._memory_for(size * dtype.itemsize, dtype) if xp is np and self._lent is None else None
        if memory is None:
            return xp.empty(shape, dtype)
        self._lent = self._count + 1
        self._wait_for_slot(memory, self._lent)
        return memory.operand(self.node.rank, self._lent % SLOTS, size, dtype).reshape(shape)

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        if x.nbytes < self._bounds[0]:
            return self._all_reduce_small(x, op, out)
        return self.start_all_reduce(x, op, out).wait()

    def _all_reduce_small(self, x: Array, op: str, out: Array | None) -> Array:
        y = None
        if self.across is None and isinstance(x, np.ndarray) and x.dtype in FLOATS:
            y = self._small_sums.add(x, op, out)
        return self.inner.all_reduce(x, op, out) if y is None else y

    def start_all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Pending:
        memory = self._memory_for(x.nbytes, x.dtype) if isinstance(x, np.ndarray) else None
        if memory is None:
            if x.nbytes < self._bounds[0]:  # nothing to hide
                return Pending.done(self._all_reduce_small(x, op, out))
            return self.inner.start_all_reduce(x, op, out)
        check_op(op)
        number, in_window = self._lay(memory, x)
        target = np.empty(x.shape, x.dtype) if out is None or (out is x and in_window) else out
        if self.across is not None:
            return self._moving_on(memory, number, op, target)
        return self._ending(memory, number, lambda: self._sum_all(memory, number, op, target))

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        if not self._scatters(x, sizes):  # the library's blocking call is the quickest
            return self.inner.reduce_scatter(x, sizes, dim)
        return self.start_reduce_scatter(x, sizes, dim).wait()

    def _scatters(self, x: Array, sizes: Sequence[int]) -> bool:
        """Whether the memory of one node is the way for this reduce-scatter; it may still not be had."""
        fits = isinstance(x, np.ndarray) and self.across is None and len(sizes) == self.size
        return fits and x.nbytes >= SCATTERED_TIMES * self._bounds[0]

    def start_reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Pending:
        memory = self._memory_for(x.nbytes, x.dtype) if self._scatters(x, sizes) else None
        if memory is None:
            return self.inner.start_reduce_scatter(x, sizes, dim)
        cut(x, sizes, dim)  # raises when they don't add up
        number, _ = self._lay(memory, x)
        shape, dtype = x.shape, x.dtype
        return self._ending(memory, number, lambda: self._sum_part(memory, number, shape, dtype, sizes, dim))

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        return self.start_all_gather(x, dim).wait()

    def start_all_gather(self, x: Array, dim: int = 0) -> Pending:
        if not isinstance(x, np.ndarray) or self.across is not None:
            return self.inner.start_all_gather(x, dim)
        return self._gather.start(x, dim)

    def start_all_to_all(self, blocks: Sequence[Array], lengths: Sequence[int] | None = None) -> Pending:
        return self.inner.start_all_to_all(blocks, lengths)

    def _lay(self, memory: SharedMemory, x: Array) -> tuple[int, bool]:
        """x in the window for all to see, as operand of the next sum: its number, and whether x lay there already."""
        self._count += 1
        number, self._lent = self._count, None
        self._wait_for_slot(memory, number)
        operand = memory.operand(self.node.rank, number % SLOTS, x.size, x.dtype)
        in_window = bool(operand.size) and operand.ctypes.data == x.ctypes.data
        if not in_window:
            operand.reshape(x.shape)[...] = x
        memory.tell(READY, number)
        return number, in_window

    def _ending(self, memory: SharedMemory, number: int, add: Callable[[], Array]) -> Pending:
        """The sum `number`: `add` makes it when all operands are there. Sums that were started earlier end first."""

        def finish() -> Array:
            self._finish_before(number)
            memory.wait(READY, number)
            result = add()
            del self._pending[number]
            memory.tell(DONE, number)
            return result

        self._pending[number] = Pending(finish)
        return self._pending[number]

    def _moving_on(self, memory: SharedMemory, number: int, op: str, out: Array) -> Pending:
        """The sum `number` over several nodes, in steps that can be taken behind other work; otherwise as `_ending`."""
        before = list(self._pending.values())

        def steps() -> Steps:
            for earlier in before:
                yield Need(earlier.test, earlier.wait)
            yield memory.need(READY, number)
            flat, operands = self._flat(memory, number, out)
            yield from self._sum_sliced(memory, number, operands, flat, op)
            del self._pending[number]
            memory.tell(DONE, number)
            return _shaped(flat, out)

        collective = self._pending[number] = Stepwise(steps())
        return progress.watch(collective) if self.in_background else collective

    def _sum_part(
        self, memory: SharedMemory, number: int, shape: tuple[int, ...], dtype: Any, sizes: Sequence[int], dim: int
    ) -> Array:
        """This rank's part of the sum of all operands, in rank order; a new array."""
        wholes = [memory.operand(rank, number % SLOTS, prod(shape), dtype) for rank in range(self.size)]
        parts = [cut(whole.reshape(shape), sizes, dim)[self.rank] for whole in wholes]
        out = np.empty(parts[0].shape, dtype)
        if parts[0].flags.c_contiguous:
            _sum([part.reshape(-1) for part in parts], out.reshape(-1), np.add)
        else:
            _sum(parts, out, np.add)
        return out

    def _sum_all(self, memory: SharedMemory, number: int, op: str, out: Array) -> Array:
        """Sum all operands of this one node into `out`, in rank order."""
        flat, operands = self._flat(memory, number, out)
        if self.node.size == 2 or flat.nbytes < SLICED_FROM_BYTES:
            _sum(operands, flat, reduction(op, np))
        else:
            run_to_end(self._sum_sliced(memory, number, operands, flat, op))
        return out if out.flags.c_contiguous else _shaped(flat, out)

    def _flat(self, memory: SharedMemory, number: int, out: Array) -> tuple[Array, list[Array]]:
        """Where to sum for `out`, and the operands of this node, all of them flat."""
        flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, out.dtype)
        return flat, [memory.operand(rank, number % SLOTS, out.size, out.dtype) for rank in range(self.node.size)]

    def _finish_before(self, number: int) -> None:
        for earlier in sorted(self._pending):
            if earlier < number and (pending := self._pending.get(earlier)):  # the progress thread may have ended it
                pending.wait()

    def _sum_sliced(self, memory: SharedMemory, number: int, operands: list[Array], out: Array, op: str) -> Steps:
        """This rank sums its slice for all, over the nodes too; then everybody copies the whole."""
        step = -(-out.size // self.node.size)
        own = slice(self.node.rank * step, (self.node.rank + 1) * step)
        result = memory.result(number % SLOTS, out.size, out.dtype)
        _sum([operand[own] for operand in operands], result[own], reduction(op, np))
        if self.across is not None:
            yield from self._sum_across(self.across, result[own], op)
        memory.tell(SUMMED, number)
        yield memory.need(SUMMED, number)
        out[...] = result
        return out

    def _sum_across(self, across: Group, part: Array, op: str) -> Steps:
        """The sum of this rank's part and its peers' on the other nodes, in place."""
        if not self.in_background:
            across.all_reduce(part, op, out=part)  # nobody takes steps behind work: the blocking call is the quickest
            return
        pending = across.start_all_reduce(part, op, out=part)
        yield Need(pending.test, pending.wait)
        pending.wait()

    def _wait_for_slot(self, memory: SharedMemory, number: int) -> None:
        """Return when no rank reads the slot of sum `number` any more."""
        if number <= SLOTS:
            return
        self._finish_before(number - SLOTS + 1)
        memory.wait(DONE, number - SLOTS)

    def _memory_for(self, nbytes: int, dtype: np.dtype) -> SharedMemory | None:
        """Memory with slots of at least `nbytes`, the same decision on every rank."""
        if self._failed or dtype not in FLOATS or not self._bounds[0] <= nbytes <= self._bounds[1]:
            return None
        if self._memory is None or self._memory.slot_bytes < nbytes:
            self._enlarge(nbytes)
        return self._memory

    def _enlarge(self, nbytes: int) -> None:
        """A larger window in place of this one. A collective; sums that are under way are ended first."""
        self._finish_before(self._count + 1)
        self._memory = self._map(nbytes)
        self._failed = self._memory is None
        self._count = 0
        self._lent = None

    def _map(self, nbytes: int) -> SharedMemory | None:
        """A window with slots of at least `nbytes`, or None on every rank of all nodes. A collective."""
        slot_bytes = FIRST_SLOT_BYTES
        while slot_bytes < nbytes:
            slot_bytes *= 2
        return self._shared(SLOTS, slot_bytes)

    def _shared(self, slots: int, slot_bytes: int) -> SharedMemory | None:
        memory = map_shared(self.node, slots, slot_bytes, spin=self._spin)
        return memory if all(self.inner.all_gather_objects(memory is not None)) else None


def _shaped(flat: Array, out: Array) -> Array:
    """`out` with the values of `flat`, which is a view of it where that can be."""
    if not out.flags.c_contiguous:
        out[...] = flat.reshape(out.shape)
    return out


def _sum(operands: Sequence[Array], out: Array, add: Any) -> None:
    """The operands from left to right, in stretches that stay in the cache."""
    for stretch in stretches(len(out), CACHED_ELEMENTS if len(operands) > 2 else max(len(out), 1)):
        if len(operands) == 1:
            out[stretch] = operands[0][stretch]
            continue
        add(operands[0][stretch], operands[1][stretch], out=out[stretch])
        for operand in operands[2:]:
            add(out[stretch], operand[stretch], out=out[stretch])


def has_core_for_each(node: Group) -> bool:
    """Whether each rank of a node can have a core of its own: there are enough, or a launcher has bound the ranks."""
    masks = node.all_gather_objects(affinity_cores())
    cores = frozenset().union(*masks)
    return len(affinity_cores()) >= node.size or sum(len(mask) for mask in masks) == len(cores)


def place_on_nodes(world: Group, node: Group, *, spin: bool | None = None) -> Group:
    """`world` with sums through the shared memory of each node; `world` itself where that can't be. A collective.

    `node`: the ranks of this rank's own node, in the order of their ranks. `spin`: see `NodeGroup`; a part of a job
    must know it of the whole.
    """
    kinds = set(world.all_gather_objects((node.size, orders_stores())))
    if len(kinds) > 1 or node.size == 1 or not orders_stores():
        return world
    if node.size == world.size:
        return NodeGroup(world, spin=spin)
    return NodeGroup(world, node, world.split(node.rank, world.rank), spin=spin)
