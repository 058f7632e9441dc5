"""Where a rank's arrays live: in host memory, or on one GPU that is chosen by the rank's place on its node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, aligned_zeros
from mpitp.errors import ConfigError, LaunchError


class Device(ABC):
    """A place for arrays. `xp` is the array module that computes there."""

    name: str
    xp: Any

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros, its rows beginning where a cache line does."""


class CpuDevice(Device):
    """Host memory and NumPy."""

    name = "cpu"
    xp = np

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return aligned_zeros(shape, dtype)


class AbstractDevice(CpuDevice):
    """No memory: arrays of zeros that have shape and dtype, and share one element that can't be written to."""

    name = "abstract"

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.broadcast_to(np.zeros((), dtype), shape)


class GpuDevice(Device):
    """One GPU through CuPy; the current device of this thread from the moment the object is made.

    All GPUs of a node stay visible to every rank and rank `local_rank` takes number `local_rank % GPUs`. More ranks
    than GPUs share them.
    """

    name = "gpu"

    def __init__(self, local_rank: int = 0) -> None:
        self.xp = _import_cupy()
        self._device = self.xp.cuda.Device(local_rank % _count_gpus(self.xp))
        self._device.use()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.xp.zeros(shape, dtype)


def make_device(name: str, local_rank: int = 0) -> Device:
    """The device called `name` ("cpu" or "gpu") for the rank that is number `local_rank` on its node.

    Call it before MPI starts where GPUs are used: some MPI libraries take the device that is current at their start.
    Raises LaunchError when there is no GPU or no CuPy, ConfigError for another name.
    """
    if name == "cpu":
        return CpuDevice()
    if name == "gpu":
        return GpuDevice(local_rank)
    raise ConfigError(f'device = "{name}" is unknown; expected "cpu" or "gpu"')


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise LaunchError(
            f"device gpu needs CuPy, which can't be imported here ({error}); "
            'pip install "mpitp[cuda13]" (or cuda12, as your driver has it), or use device cpu'
        ) from None
    return cupy


def _count_gpus(cupy: Any) -> int:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise LaunchError(f"device gpu: CuPy finds no usable GPU on this host ({error}); use device cpu") from None
    if count == 0:
        raise LaunchError("device gpu: CuPy finds no GPU on this host; use device cpu")
    return count
