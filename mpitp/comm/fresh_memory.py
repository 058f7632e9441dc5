"""Fresh memory for MPICH's start under SLURM.

Every rank tells the others its network address through its launcher. MPICH 5.0 with UCX tells 4 KiB however short the
address is, so what happens to lie behind it in memory goes along: written in hex, runs of zeros shortened, in lines of
at most 1,024 characters beside their key. SLURM's PMI reads no line longer than 1,024 characters with the key. Where
text lies behind the address, lines are longer; the ranks then wait for ever or end in an assertion of UCX. (MPICH's own
launcher reads longer lines.)

So all that was freed before is taken first, and MPI's start gets memory that nothing has been written to: zeros.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LARGEST, SMALLEST, GRAIN = 1024, 32, 16  # bytes of the pieces that free memory is taken in
MOST_PIECES = 1_000_000


@contextmanager
def fresh_memory(library: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """While the block runs, the C library gives out memory that was never used, where a start by MPICH needs it."""
    by_slurm = "PMI_FD" in environ and "SLURM_PROCID" in environ
    libc = ctypes.CDLL(None)
    if not (library.startswith("MPICH") and by_slurm and hasattr(libc, "malloc_trim")):
        yield
        return
    pieces = _freed_memory(libc)
    try:
        yield
    finally:
        for piece in pieces:
            libc.free(piece)


def _freed_memory(libc: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Take all memory below the heap's end that is free, largest pieces first."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.malloc_trim(ctypes.c_size_t(0))  # gives what is free at the heap's end back: there it begins anew, with zeros
    end = libc.sbrk(0) or 0
    pieces: list[ctypes.c_void_p] = []
    for size in range(LARGEST, SMALLEST - 1, -GRAIN):
        while len(pieces) < MOST_PIECES:
            piece = libc.malloc(size)
            pieces.append(piece)
            if piece is None or piece + size > end:  # nothing so large is free below: this piece is a new one
                break
    return pieces
