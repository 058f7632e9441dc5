"""Sums in a strict order, along the chain of the ranks.

The running sum goes from rank 0 to the last rank, each of which adds its partials; the total goes on to rank 0 and
along the same chain. Both travel in stretches, each of which a rank passes on before it asks for the next: all links
work at once, and each carries the array twice, as in a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.comm.buffers import Buffers
from mpitp.comm.pairwise_all_reduce import Links

_TAG_PARTIAL, _TAG_TOTAL = 32765, 32766  # see `mpi.py`


def chain_sum(links: Links, buffers: Buffers, parts: Sequence[Array], partials: Sequence[Array]) -> None:
    """Fill `parts`, the flat stretches of the result, with ((0 + p0) + p1) + ... of all ranks' flat `partials`."""
    sent = _pass_partial_sums(links, buffers, parts, partials)
    sent += _pass_totals(links, parts, sent)
    links.need(sent).wait()


def _pass_partial_sums(links: Links, buffers: Buffers, parts: Sequence[Array], partials: Sequence[Array]) -> list[Any]:
    """Running sums come from the rank before, get this rank's partials and go to the rank after (cyclic)."""
    comm, rank, size = links.comm, links.comm.Get_rank(), links.comm.Get_size()
    sent, start = [], 0
    for part in parts:
        if rank:
            comm.Recv(links.buffer(part), rank - 1, _TAG_PARTIAL)
        else:
            part[...] = 0
        buffers.add(part, [partial[start : start + part.size] for partial in partials])
        tag = _TAG_TOTAL if rank == size - 1 else _TAG_PARTIAL
        sent.append(comm.Isend(links.buffer(part), (rank + 1) % size, tag))
        start += part.size
    return sent


def _pass_totals(links: Links, parts: Sequence[Array], partials_sent: Sequence[Any]) -> list[Any]:
    comm, rank, size = links.comm, links.comm.Get_rank(), links.comm.Get_size()
    sent: list[Any] = []
    if rank == size - 1:
        return sent
    for part, partial_sent in zip(parts, partials_sent, strict=True):
        partial_sent.Wait()  # the total takes the place of the running sum
        comm.Recv(links.buffer(part), (rank - 1) % size, _TAG_TOTAL)
        if rank + 1 < size - 1:
            sent.append(comm.Isend(links.buffer(part), rank + 1, _TAG_TOTAL))
    return sent
