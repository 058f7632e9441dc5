"""Which array module an array belongs to, and the two explicit ways between host and device.

Code is written once against the module of its inputs: `xp = array_module(x)`, then `xp.exp(x)`. NumPy arrays live on
the host; the arrays of every other module (CuPy, or anything that works alike) live on a device, and nothing but
`to_host` and `from_host` moves values between the two. A device module is one that has `asnumpy`, as CuPy has.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

Array = Any  # a NumPy array, or an array of a module that works alike (CuPy)

LINE_BYTES = 64  # of a cache line, and of the widest vector register

_module_of_type: dict[type, Any] = {np.ndarray: np}


def array_module(x: Array) -> Any:
    """The module whose functions work on `x`: `numpy`, `cupy`, ...

    Raises TypeError for what is no array: a silent `asarray` here would move data between host and device.
    """
    module = _module_of_type.get(type(x))
    if module is None:
        module = _find_module(x)
        _module_of_type[type(x)] = module
    return module


def _find_module(x: Array) -> Any:
    if isinstance(x, np.ndarray | np.generic):
        return np
    defined_in = type(x).__module__
    for name in (defined_in, defined_in.partition(".")[0]):
        module = sys.modules.get(name)
        if module is not None and is_device_module(module):
            return module
    namespace = getattr(x, "__array_namespace__", None)
    if namespace is not None:
        return namespace()
    raise TypeError(f"expected an array of NumPy, CuPy or a module that works alike, got {type(x).__qualname__}")


def is_device_module(module: Any) -> bool:
    """Whether arrays of `module` live on a device, so that they need `asnumpy` to be read on the host."""
    return module is not np and callable(getattr(module, "asnumpy", None))


def to_host(x: Array) -> np.ndarray:
    """`x` as a NumPy array: itself when it is one, else a copy in host memory. Waits for the device."""
    module = array_module(x)
    return x if module is np else module.asnumpy(x)


def from_host(host: np.ndarray, module: Any) -> Array:
    """A NumPy array as an array of `module`: itself for NumPy, else a copy on the current device."""
    if not isinstance(host, np.ndarray | np.generic):
        raise TypeError(f"expected a NumPy array, got {type(host).__qualname__}: use to_host first")
    return host if module is np else module.asarray(host)


def synchronize(module: Any) -> None:
    """Return when all work queued on the current stream of `module`'s device has ended. Nothing to do for NumPy."""
    if module is not np:
        module.cuda.get_current_stream().synchronize()


def host_buffer(shape: tuple[int, ...], dtype: Any, module: Any) -> np.ndarray:
    """Uninitialised host memory for copies from and to the device of `module`: pinned where the module can do that."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    allocate = None if module is np else getattr(module.cuda, "alloc_pinned_memory", None)
    if allocate is None or count == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(allocate(count * dtype.itemsize), np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)


def aligned_zeros(shape: tuple[int, ...], dtype: Any, module: Any = np) -> Array:
    """Zeros that begin where a cache line does. NumPy promises 16 bytes, and then every wide load may touch two lines.

    Device modules align by themselves.
    """
    if module is not np:
        return module.zeros(shape, dtype)
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + nbytes].view(dtype).reshape(shape)


__all__ = [
    "Array",
    "aligned_zeros",
    "array_module",
    "from_host",
    "host_buffer",
    "is_device_module",
    "synchronize",
    "to_host",
]
