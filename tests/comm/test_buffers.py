from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitp.comm.buffers import DirectBuffers, HostBuffers, StagedBuffers
from mpitp.comm.device_aware import _cray_mpich
from mpitp.errors import LaunchError
from tests import strict_cupy


class FakeDevice:
    """NumPy with the parts of `cupy.cuda` that the direct buffers asks for; `log` tells what it did."""

    def __init__(self, pool: Any = None) -> None:
        self.log: list[str] = []

        class MemoryAsyncPool:
            def malloc(self) -> None:
                pass

        allocate = MemoryAsyncPool().malloc if pool == "async" else (lambda: None)
        stream = SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))
        self.cuda = SimpleNamespace(
            MemoryAsyncPool=MemoryAsyncPool, get_allocator=lambda: allocate, get_current_stream=lambda: stream
        )
        self.empty, self.may_share_memory = np.empty, np.may_share_memory

    def ascontiguousarray(self, x: np.ndarray) -> np.ndarray:
        self.log.append("contiguous")
        return np.ascontiguousarray(x)


def test_host_arrays_go_as_they_are_if_c_contiguous() -> None:
    buffers, x = HostBuffers(), np.arange(6.0).reshape(2, 3)
    assert buffers.outgoing(x) is x
    assert buffers.shares(buffers.outgoing(x), x)
    turned = buffers.outgoing(x.T)
    assert turned.flags.c_contiguous and not buffers.shares(turned, x)
    assert buffers.outgoing(np.float64(1)).shape == ()


def test_staged_arrays_wait_for_the_device() -> None:
    buffers, x = StagedBuffers(strict_cupy), strict_cupy.asarray(np.arange(6.0).reshape(2, 3))
    strict_cupy.transfers.reset()
    buffer = buffers.outgoing(x.T)
    assert strict_cupy.transfers.synchronized == 1
    assert buffer.flags.c_contiguous and buffer.tolist() == [[0, 3], [1, 4], [2, 5]]
    buffers.add(buffer, [x.T, x.T])
    assert buffers.incoming(buffer).get().tolist() == [[0, 9], [3, 12], [6, 15]]


def test_direct_arrays_are_contiguous_before_the_device_is_waited_for() -> None:
    module = FakeDevice()
    buffers, x = DirectBuffers(module), np.arange(6.0).reshape(2, 3).T
    assert buffers.outgoing(x).flags.c_contiguous
    assert module.log == ["contiguous", "synchronize"]
    total = buffers.empty((3, 2), "f8")
    total[...] = 0
    buffers.add(total, [x, x])
    assert module.log[-1] == "synchronize" and (total == 2 * x).all()
    assert not buffers.can_start


def test_async_pool_is_refused_with_a_device_aware_mpi() -> None:
    with pytest.raises(LaunchError, match="MemoryAsyncPool"):
        DirectBuffers(FakeDevice("async"))


@pytest.mark.parametrize(
    ("environ", "libraries", "aware"),
    [
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, "libmpi_gtl_cuda.so", True),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, "libmpi.so", False),
        ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, "libmpi_gtl_cuda.so", False),
    ],
)
def test_cray_mpich(environ: dict[str, str], libraries: str, aware: bool) -> None:
    found = _cray_mpich(environ, libraries)
    assert found is not None and found.aware is aware and "MPICH_GPU_SUPPORT_ENABLED" in found.how


def test_other_libraries_are_asked() -> None:
    assert _cray_mpich({}, "libmpi_gtl_cuda.so") is None
