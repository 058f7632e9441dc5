"""Ranks as processes that talk through MPI (mpi4py).

What has to be right about every call is done here and in `buffers.py`, once: contiguity, streams and staging of device
arrays, 16-bit floats summed in float32, element counts beyond what the libraries take in one call, empty arrays.

`max` and `min` of NaN are whatever the MPI library makes of them; sums carry NaN on as always.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module, synchronize
from mpitp.backend.precision import wide_dtype
from mpitp.comm.buffers import Buffers, DirectBuffers, HostBuffers, StagedBuffers
from mpitp.comm.chain_sum import chain_sum
from mpitp.comm.device_aware import query_device_awareness
from mpitp.comm.group import Group, Pending
from mpitp.comm.mpi_types import MpiTypes
from mpitp.comm.pairwise_all_reduce import Links, pairwise_all_reduce
from mpitp.comm.progress import Need, Steps, Stepwise, progress
from mpitp.comm.reductions import check_op, cut, reduction, stretches, sum_in_order
from mpitp.comm.serial import SerialGroup
from mpitp.errors import UsageError

# Tags of our own messages (`chain_sum.py` has two): the highest that the standard grants, away from `send`'s callers.
_TAG_BLOCK = 32767
_TAG_PAIRWISE, _PAIRWISE_SUMS = 32000, 256  # two tags for each of so many under way
FIRST_NAP_SECONDS, MOST_NAP_SECONDS = 1e-4, 2e-3  # between two looks for a message: half a percent of a core
SMALLEST_BACKGROUND_BYTES = 1 << 16  # a smaller sum is over before the progress thread has a turn


@dataclass(frozen=True, slots=True)
class _Calls:
    """The collectives of one communicator, either the blocking ones (which return None) or those that start."""

    all_reduce: Callable[..., Any]
    all_gather: Callable[..., Any]
    reduce_scatter: Callable[..., Any]
    reduce: Callable[..., Any]
    broadcast: Callable[..., Any]


class MpiGroup(Group):
    """The ranks of the mpi4py communicator `comm`.

    `chunk_elements`: the most elements in one call (Open MPI 5 fails beyond 2^31 - 1).
    `pipeline_elements`: the stretch in which `all_reduce_in_order` hands its running sum on.
    `device_aware`: whether the library reads device memory; None asks the library when the first device array comes.
    `in_background`: large started sums are moved on while the rank computes (`progress.py`), all else is done at once.
    Worth it between nodes only; MPI must have been started for several threads.
    `place`: puts a group that is split off on its nodes, as `world_group` does with the whole; None: it stays as it is.
    """

    def __init__(
        self,
        comm: Any,
        *,
        chunk_elements: int = 2**28,
        pipeline_elements: int = 2**16,
        device_aware: bool | None = None,
        in_background: bool = False,
        place: Callable[[MpiGroup], Group] | None = None,
    ) -> None:
        from mpi4py import MPI

        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._mpi = MPI
        self._chunk = chunk_elements
        self._pipeline = pipeline_elements
        self._device_aware = device_aware
        self._place = place
        self.in_background = in_background and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.smallest_background_bytes = SMALLEST_BACKGROUND_BYTES
        self._types = MpiTypes(MPI, chunk_elements)
        self._links = Links(comm, self._types.raw, self._need)
        self._pairwise_sums = 0  # that were started
        self._ops = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
        self._buffers_of: dict[Any, Buffers] = {np: HostBuffers()}
        self._now = _Calls(comm.Allreduce, comm.Allgatherv, comm.Reduce_scatter, comm.Reduce, comm.Bcast)
        self._later = _Calls(comm.Iallreduce, comm.Iallgatherv, comm.Ireduce_scatter, comm.Ireduce, comm.Ibcast)

    # Sums and their like

    def all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Array:
        return self._all_reduce(x, op, out, self._now).wait()

    def start_all_reduce(self, x: Array, op: str = "sum", out: Array | None = None) -> Pending:
        return self._all_reduce(x, op, out, self._starting_calls(x), starts=True)

    def _all_reduce(self, x: Array, op: str, out: Array | None, calls: _Calls, *, starts: bool = False) -> Pending:
        check_op(op)
        buffers = self._buffers(x)
        dtype = wide_dtype(x.dtype)
        kind = self._types.reduced(dtype)
        source = buffers.outgoing(x.astype(dtype, copy=False))
        target = self._reduction_target(buffers, source, x, out)
        send, receive = source.reshape(-1), target.reshape(-1)
        if starts and buffers.can_start and self._goes_in_background(send):
            return self._start_pairwise(send, receive, op, lambda: _deliver(buffers, target, x, out))
        requests = []
        for part in stretches(receive.size, self._chunk):
            buffer = self._mpi.IN_PLACE if target is source else [send[part], kind]
            requests.append(calls.all_reduce(buffer, [receive[part], kind], self._ops[op]))
        return self._pending(requests, lambda: _deliver(buffers, target, x, out))

    def _goes_in_background(self, flat: Array) -> bool:
        is_large = flat.nbytes >= self.smallest_background_bytes and flat.size <= self._chunk
        return self.in_background and self.size > 1 and is_large

    def _start_pairwise(self, send: Array, receive: Array, op: str, finish: Callable[[], Array]) -> Pending:
        self._pairwise_sums += 1
        tag = _TAG_PAIRWISE + 2 * (self._pairwise_sums % _PAIRWISE_SUMS)
        collective = Stepwise(pairwise_all_reduce(self._links, send, receive, reduction(op, np), tag))
        collective.test()  # sends the first messages

        def wait() -> Array:
            collective.wait()
            return finish()  # in the rank's own thread: it may use the device

        return Pending(wait, progress.watch(collective).test)

    def _reduction_target(self, buffers: Buffers, source: Array, x: Array, out: Array | None) -> Array:
        """The buffer that gets the result; `source` itself when the reduction may happen in place."""
        if not buffers.shares(source, x):
            return source
        if out is not None and out.dtype == source.dtype and out.flags.c_contiguous:
            if out is x:
                return source
            if not buffers.shares(out, x):
                return out
        return buffers.empty(source.shape, source.dtype)

    def reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Array:
        return self._reduce_scatter(x, sizes, dim, self._now).wait()

    def start_reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int = 0) -> Pending:
        return self._reduce_scatter(x, sizes, dim, self._starting_calls(x))

    def _reduce_scatter(self, x: Array, sizes: Sequence[int], dim: int, calls: _Calls) -> Pending:
        if len(sizes) != self.size:
            raise UsageError(f"reduce_scatter needs one size for each of {self.size} ranks, got {list(sizes)}")
        buffers = self._buffers(x)
        dtype = wide_dtype(x.dtype)
        pieces = [piece.astype(dtype, copy=False) for piece in cut(x, sizes, dim)]
        packed = buffers.outgoing(_pack(x, pieces, dim))
        own = buffers.empty(pieces[self.rank].shape, dtype)
        counts = [piece.size for piece in pieces]
        requests = self._scatter_sums(packed, own.reshape(-1), counts, self._types.reduced(dtype), calls)
        return self._pending(requests, lambda: _deliver(buffers, own, x, None))

    def _scatter_sums(self, packed: Array, own: Array, counts: list[int], kind: Any, calls: _Calls) -> list[Any]:
        if sum(counts) <= self._chunk:
            return [calls.reduce_scatter([packed, kind], [own, kind], counts, self._mpi.SUM)] if sum(counts) else []
        requests, start = [], 0
        for root, count in enumerate(counts):
            piece = packed[start : start + count]
            for part in stretches(count, self._chunk):
                target = [own[part], kind] if root == self.rank else None
                requests.append(calls.reduce([piece[part], kind], target, self._mpi.SUM, root))
            start += count
        return requests

    def all_reduce_in_order(self, partials: Sequence[Array], like: Array) -> Array:
        """See `Group` and `chain_sum.py`."""
        if self.size == 1:
            return sum_in_order(partials, like)
        buffers = self._buffers(like)
        total = buffers.empty(like.shape, wide_dtype(like.dtype))
        if not total.size:
            return array_module(like).empty(like.shape, like.dtype)
        parts = [total.reshape(-1)[part] for part in stretches(total.size, self._pipeline)]
        chain_sum(self._links, buffers, parts, [partial.reshape(-1) for partial in partials])
        return buffers.incoming(total.astype(like.dtype, copy=False))

    # Moving values

    def all_gather(self, x: Array, dim: int = 0) -> Array:
        return self._all_gather(x, dim, self._now).wait()

    def start_all_gather(self, x: Array, dim: int = 0) -> Pending:
        return self._all_gather(x, dim, self._starting_calls(x))

    def _all_gather(self, x: Array, dim: int, calls: _Calls) -> Pending:
        dim = dim % x.ndim
        buffers = self._buffers(x)
        lengths = self._exchange_lengths(x, dim)
        shapes = [x.shape[:dim] + (length,) + x.shape[dim + 1 :] for length in lengths]
        counts = [prod(shape) for shape in shapes]
        source = buffers.outgoing(x)
        joined = buffers.empty((sum(counts),), x.dtype)
        requests = self._gather_flat(source.reshape(-1), joined, counts, calls)
        return self._pending(requests, lambda: _join(buffers.incoming(joined), shapes, counts, dim))

    def _gather_flat(self, source: Array, joined: Array, counts: list[int], calls: _Calls) -> list[Any]:
        """Every rank's flat `source` into `joined`, one after the other; `counts` elements came from each rank."""
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        send, unit = self._types.raw(source)
        receive, _ = self._types.raw(joined)
        per_element = receive.size // joined.size if joined.size else 1
        if joined.size <= self._chunk:
            layout = ([c * per_element for c in counts], [s * per_element for s in starts])
            return [calls.all_gather([send, unit], [receive, layout, unit])] if joined.size else []
        own = starts[self.rank]
        joined[own : own + source.size] = source
        synchronize(array_module(joined))
        requests = []
        for root, (start, count) in enumerate(zip(starts, counts, strict=True)):
            piece = joined[start : start + count]
            requests += [calls.broadcast(self._types.raw(piece[part]), root) for part in stretches(count, self._chunk)]
        return requests

    def _exchange_lengths(self, x: Array, dim: int) -> list[int]:
        """Every rank's length along `dim`; all ranks raise when the other dims or the item sizes differ."""
        length = x.shape[dim]
        rest = prod(x.shape[:dim] + x.shape[dim + 1 :])
        own = np.array([length, rest, x.dtype.itemsize], np.int64)
        table = np.empty((self.size, 3), np.int64)
        self.comm.Allgather(own, table)
        if (table[:, 1:] != table[0, 1:]).any():
            raise RuntimeError(f"all_gather along dim {dim}: the ranks' arrays don't fit; this rank has {_like(x)}")
        return table[:, 0].tolist()

    def all_to_all(self, blocks: Sequence[Array]) -> list[Array]:
        return self.start_all_to_all(blocks).wait()

    def start_all_to_all(self, blocks: Sequence[Array], lengths: Sequence[int] | None = None) -> Pending:
        assert len(blocks) == self.size, f"all_to_all needs {self.size} blocks, got {len(blocks)}"
        buffers, own = self._buffers(blocks[0]), blocks[self.rank]
        if lengths is None:
            shapes = self.comm.alltoall([tuple(block.shape) for block in blocks])
        else:
            shapes = [(length, *own.shape[1:]) for length in lengths]
        received = [buffers.empty(shape, own.dtype) for shape in shapes]
        requests, kept = [], []
        for distance in range(1, self.size):
            source, dest = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            kept.append(buffers.outgoing(blocks[dest]))
            requests += [self.comm.Irecv(buffer, source, _TAG_BLOCK) for buffer in self._types.chunks(received[source])]
            requests += [self.comm.Isend(buffer, dest, _TAG_BLOCK) for buffer in self._types.chunks(kept[-1])]

        def finish() -> list[Array]:
            result = [buffers.incoming(buffer) for buffer in received]
            result[self.rank] = own.copy()
            return result

        return self._message(requests, sum(buffer.nbytes for buffer in kept), finish)

    def broadcast(self, x: Array, root: int = 0) -> Array:
        buffers = self._buffers(x)
        buffer = buffers.outgoing(x) if self.rank == root else buffers.empty(x.shape, x.dtype)
        for chunk in self._types.chunks(buffer):
            self.comm.Bcast(chunk, root)
        return x if self.rank == root else buffers.incoming(buffer)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        data = np.frombuffer(_pickled(value), np.uint8) if self.rank == root else np.empty(0, np.uint8)
        size = np.array([data.size], np.int64)
        self.comm.Bcast(size, root)
        received = self.broadcast(data if self.rank == root else np.empty(size[0], np.uint8), root)
        return value if self.rank == root else pickle.loads(received)

    def all_gather_objects(self, value: Any) -> list[Any]:
        own = np.frombuffer(_pickled(value), np.uint8)
        lengths = self._exchange_lengths(own, 0)
        joined = np.empty(sum(lengths), np.uint8)
        self._gather_flat(own, joined, lengths, self._now)
        return [pickle.loads(piece) for piece in cut(joined, lengths, 0)]

    def send(self, x: Array, dest: int, tag: int = 0) -> None:
        for chunk in self._types.chunks(self._buffers(x).outgoing(x)):
            self.comm.Send(chunk, dest, tag)

    def recv(self, like: Array, source: int, tag: int = 0) -> Array:
        buffers = self._buffers(like)
        buffer = buffers.empty(like.shape, like.dtype)
        for chunk in self._types.chunks(buffer):
            self.comm.Recv(chunk, source, tag)
        return buffers.incoming(buffer)

    def start_send(self, x: Array, dest: int, tag: int = 0) -> Pending:
        chunks = self._types.chunks(self._buffers(x).outgoing(x))
        return self._message([self.comm.Isend(chunk, dest, tag) for chunk in chunks], x.nbytes, lambda: x)

    def start_recv(self, like: Array, source: int, tag: int = 0) -> Pending:
        buffers = self._buffers(like)
        buffer = buffers.empty(like.shape, like.dtype)
        requests = [self.comm.Irecv(chunk, source, tag) for chunk in self._types.chunks(buffer)]
        return self._message(requests, like.nbytes, lambda: buffers.incoming(buffer))

    def _message(self, requests: list[Any], nbytes: int, finish: Callable[[], Any]) -> Pending:
        """Messages under way, moved on while the rank computes where a sum of as many bytes would be."""
        if not requests or not self.in_background or nbytes < self.smallest_background_bytes:
            return self._pending(requests, finish)
        message = Stepwise(_until(self._need(requests)))
        message.test()

        def wait() -> Array:
            message.wait()
            return finish()  # in the rank's own thread: it may use the device

        return Pending(wait, progress.watch(message).test)

    def wait_for(self, source: int, tag: int = 0) -> None:
        nap = FIRST_NAP_SECONDS
        while not self.comm.Iprobe(source, tag):
            time.sleep(nap)
            nap = min(2 * nap, MOST_NAP_SECONDS)

    def barrier(self) -> None:
        self.comm.Barrier()

    def split(self, color: int, key: int) -> Group:
        comm = self.comm.Split(color, key)
        if comm.Get_size() == 1:
            comm.Free()
            return SerialGroup()
        group = MpiGroup(
            comm,
            chunk_elements=self._chunk,
            pipeline_elements=self._pipeline,
            device_aware=self._device_aware,
            in_background=self.in_background,
            place=self._place,
        )
        return group if self._place is None else self._place(group)

    def bare(self) -> MpiGroup:
        """The same ranks; what is split off from here is not placed on nodes."""
        return MpiGroup(self.comm, chunk_elements=self._chunk, in_background=self.in_background)

    def split_by_node(self) -> Group:
        """The ranks of this rank's own node."""
        comm = self.comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        if comm.Get_size() == 1:
            comm.Free()
            return SerialGroup()
        return MpiGroup(comm, chunk_elements=self._chunk, pipeline_elements=self._pipeline)

    # Helpers

    def _buffers(self, x: Array) -> Buffers:
        module = array_module(x)
        if module not in self._buffers_of:
            if self._device_aware is None:
                self._device_aware = query_device_awareness().aware
            self._buffers_of[module] = DirectBuffers(module) if self._device_aware else StagedBuffers(module)
        return self._buffers_of[module]

    def _starting_calls(self, x: Array) -> _Calls:
        """The library's own started collectives, which are for one thread: Open MPI's end too early when another one
        makes progress too (seen in version 5.0.11).
        """
        return self._later if self._buffers(x).can_start and not self.in_background else self._now

    def _pending(self, requests: list[Any], finish: Callable[[], Array]) -> Pending:
        """The collective that `requests` carry out (entries are None where a blocking call has done it).

        mpi4py's requests keep their buffers alive.
        """
        started = [request for request in requests if request is not None]
        if not started:
            return Pending.done(finish())

        def wait() -> Array:
            self._mpi.Request.Waitall(started)
            return finish()

        return Pending(wait, lambda: bool(self._mpi.Request.Testall(started)))

    def _need(self, requests: list[Any]) -> Need:
        """That messages have come and gone."""
        request = self._mpi.Request
        return Need(lambda: request.Testall(requests), lambda: request.Waitall(requests))


def _until(need: Need) -> Steps:
    """No more than that what is needed is there."""
    yield need
    return None


def _deliver(buffers: Buffers, buffer: Array, x: Array, out: Array | None) -> Array:
    """The received buffer in the dtype of `x`, in `out` where one was given."""
    result = buffers.incoming(buffer.astype(x.dtype, copy=False))
    if out is None or result is out:
        return result
    out[...] = result
    return out


def _pack(x: Array, pieces: list[Array], dim: int) -> Array:
    """The pieces one after the other, flat; no copy where they lie so already."""
    if dim % x.ndim == 0 and pieces[0].dtype == x.dtype:
        return x.reshape(-1)
    return array_module(x).concatenate([piece.reshape(-1) for piece in pieces])


def _join(flat: Array, shapes: list[tuple[int, ...]], counts: list[int], dim: int) -> Array:
    """Pieces that lie one after the other as one array, joined along `dim`."""
    if dim == 0:
        return flat.reshape((sum(shape[0] for shape in shapes),) + shapes[0][1:])
    pieces = [piece.reshape(shape) for piece, shape in zip(cut(flat, counts, 0), shapes, strict=True)]
    return array_module(flat).concatenate(pieces, axis=dim)


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _like(x: Array) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
