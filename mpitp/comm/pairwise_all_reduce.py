r"""All-reduce by messages between all pairs of ranks, in steps that can be taken behind other work.

    rank r    sends slice s of its array to rank s, for every s, and gets slice r of every array
              adds these in rank order
              sends the sum, slice r of the result, to every rank, and gets the other slices

Each rank sends and gets 2 (p - 1) / p times the array, the least possible, in two rounds. MPICH's own started
all-reduce does as well; Open MPI's takes twice the time between two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.progress import Need, Steps


@dataclass(frozen=True, slots=True)
class Links:
    """Ways to the ranks of an mpi4py communicator: `buffer` makes an array what it takes; `need`, of its requests."""

    comm: Any
    buffer: Callable[[Array], Any]
    need: Callable[[list[Any]], Need]


def pairwise_all_reduce(links: Links, send: Array, receive: Array, add: Any, tag: int) -> Steps:
    """`receive` = all ranks' `send`, put together by the ufunc `add` in rank order.

    Flat host arrays of one size and dtype; they may be the same array. Messages have `tag` and `tag + 1`.
    """
    comm, buffer, need = links.comm, links.buffer, links.need
    rank, size = comm.Get_rank(), comm.Get_size()
    bounds = [send.size * r // size for r in range(size + 1)]
    slices = [slice(bounds[r], bounds[r + 1]) for r in range(size)]
    own = slices[rank]
    others = [(rank + distance) % size for distance in range(1, size)]  # not everybody to rank 0 first
    parts = {r: np.empty(own.stop - own.start, send.dtype) for r in others}
    requests = [comm.Irecv(buffer(parts[r]), r, tag) for r in others]
    requests += [comm.Isend(buffer(send[slices[r]]), r, tag) for r in others]
    yield need(requests)
    parts[rank] = send[own] if rank < 2 else send[own].copy()  # `receive` may be `send`
    add(parts[0], parts[1], out=receive[own])
    for r in range(2, size):
        add(receive[own], parts[r], out=receive[own])
    requests = [comm.Irecv(buffer(receive[slices[r]]), r, tag + 1) for r in others]
    requests += [comm.Isend(buffer(receive[own]), r, tag + 1) for r in others]
    yield need(requests)
    return receive
