"""How arrays get to and from MPI: the buffers that are handed to the library.

MPI reads raw memory. It must be contiguous in C order (an F-ordered array would be sent scrambled, silently), the
device must have finished writing it, and the library must be able to reach it. One `Buffers` object sees to it for one
array module:

| kind | arrays | what MPI is handed |
|---|---|---|
| `HostBuffers` | NumPy | the arrays themselves, copied only where not C-contiguous |
| `StagedBuffers` | on a device | copies in pinned host memory |
| `DirectBuffers` | on a device, with a device-aware MPI | the arrays themselves, after the stream is synchronised |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, from_host, host_buffer, synchronize, to_host
from mpitp.comm.reductions import add_in_order
from mpitp.errors import LaunchError


class Buffers(ABC):
    """Buffers for the arrays of one module. `can_start`: whether non-blocking collectives may work on them."""

    can_start: bool

    @abstractmethod
    def outgoing(self, x: Array) -> Array:
        """A C-contiguous buffer with the values of `x`; it may be `x` itself, so only read it."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """A C-contiguous buffer to receive into."""

    @abstractmethod
    def incoming(self, buffer: Array) -> Array:
        """The array whose values stand in `buffer`, which is given up."""

    @abstractmethod
    def shares(self, buffer: Array, x: Array) -> bool:
        """Whether writing to `buffer` could change `x`."""

    @abstractmethod
    def add(self, buffer: Array, partials: Sequence[Array]) -> None:
        """Add arrays (of the module, shaped as `buffer`) to `buffer`, from left to right."""


class HostBuffers(Buffers):
    """NumPy arrays go as they are."""

    can_start = True

    def outgoing(self, x: Array) -> Array:
        return np.asarray(x, order="C")

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def incoming(self, buffer: Array) -> Array:
        return buffer

    def shares(self, buffer: Array, x: Array) -> bool:
        return buffer is x or np.may_share_memory(buffer, x)

    def add(self, buffer: Array, partials: Sequence[Array]) -> None:
        add_in_order(buffer, partials)


class StagedBuffers(Buffers):
    """Device arrays go through host memory."""

    can_start = True

    def __init__(self, module: Any) -> None:
        self._module = module

    def outgoing(self, x: Array) -> Array:
        synchronize(self._module)
        buffer = host_buffer(x.shape, x.dtype, self._module)
        self._module.asnumpy(x, out=buffer)
        return buffer

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return host_buffer(tuple(shape), dtype, self._module)

    def incoming(self, buffer: Array) -> Array:
        return from_host(buffer, self._module)

    def shares(self, buffer: Array, x: Array) -> bool:
        return False

    def add(self, buffer: Array, partials: Sequence[Array]) -> None:
        total = from_host(buffer, self._module)
        add_in_order(total, partials)
        buffer[...] = to_host(total)


class DirectBuffers(Buffers):
    """Device arrays are handed to a library that can read device memory."""

    can_start = False  # Open MPI takes no device buffers in non-blocking collectives

    def __init__(self, module: Any) -> None:
        self._module = module
        _refuse_async_pool(module)

    def outgoing(self, x: Array) -> Array:
        buffer = self._module.ascontiguousarray(x).reshape(x.shape)
        synchronize(self._module)
        return buffer

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        buffer = self._module.empty(tuple(shape), dtype)
        synchronize(self._module)  # the block may be one that work still queued is using
        return buffer

    def incoming(self, buffer: Array) -> Array:
        return buffer

    def shares(self, buffer: Array, x: Array) -> bool:
        return bool(self._module.may_share_memory(buffer, x))

    def add(self, buffer: Array, partials: Sequence[Array]) -> None:
        add_in_order(buffer, partials)
        synchronize(self._module)


def _refuse_async_pool(module: Any) -> None:
    pool = getattr(module.cuda.get_allocator(), "__self__", None)
    if isinstance(pool, module.cuda.MemoryAsyncPool):
        raise LaunchError(
            "CuPy's asynchronous allocator (MemoryAsyncPool) can't be used with a CUDA-aware MPI: its blocks can't be "
            "shared between processes; use CuPy's default memory pool"
        )
