from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitp.backend.arrays import (
    LINE_BYTES,
    aligned_zeros,
    array_module,
    from_host,
    host_buffer,
    synchronize,
    to_host,
)
from tests import strict_cupy


def test_module_of_an_array(xp: Any) -> None:
    x = from_host(np.ones((2, 3), "f4"), xp)
    assert array_module(x) is xp
    assert array_module(x.T[1:]) is xp


def test_numpy_scalars_and_subclasses_are_host_arrays() -> None:
    class Sub(np.ndarray):
        pass

    for x in (np.float32(1), np.ones(3).view(Sub), ml_dtypes.bfloat16(1)):
        assert array_module(x) is np


@pytest.mark.parametrize("x", [1.0, [1.0], "text", None])
def test_what_is_no_array_is_refused(x: object) -> None:
    with pytest.raises(TypeError, match=f"expected an array .*, got {type(x).__name__}"):
        array_module(x)


def test_to_host_and_back(xp: Any) -> None:
    host = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    x = from_host(host, xp)
    assert (x is host) == (xp is np)
    back = to_host(x)
    assert (back is host) == (xp is np)
    assert back.dtype == host.dtype and (back == host).all()


def test_from_host_takes_host_arrays_only() -> None:
    with pytest.raises(TypeError, match="use to_host first"):
        from_host(strict_cupy.zeros(3), np)
    with pytest.raises(TypeError, match="use to_host first"):
        from_host([1.0], np)


def test_array_api_namespace_is_used_for_other_arrays() -> None:
    class Foreign:
        def __array_namespace__(self) -> str:
            return "its module"

    assert array_module(Foreign()) == "its module"


def test_synchronize_waits_for_devices_only(xp: Any) -> None:
    strict_cupy.transfers.reset()
    synchronize(xp)
    assert strict_cupy.transfers.synchronized == (xp is not np)


def test_host_buffer_is_pinned_where_the_module_can(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_buffer((2, 3), "f4", xp).shape == (2, 3)
    asked = []
    pin = lambda nbytes: asked.append(nbytes) or bytearray(nbytes + 512)  # noqa: E731  CuPy's pool gives larger blocks
    monkeypatch.setattr(strict_cupy.cuda, "alloc_pinned_memory", pin, raising=False)
    buffer = host_buffer((2, 3), ml_dtypes.bfloat16, strict_cupy)
    assert (buffer.shape, buffer.dtype, asked) == ((2, 3), ml_dtypes.bfloat16, [12])
    buffer[...] = 1
    assert host_buffer((0, 3), "f4", strict_cupy).shape == (0, 3)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16])
def test_aligned_zeros_begin_where_a_cache_line_does(shape: tuple[int, ...], dtype: type) -> None:
    arrays = [aligned_zeros(shape, dtype) for _ in range(5)]
    for x in arrays:
        assert x.shape == shape and x.dtype == dtype and x.flags.c_contiguous and x.flags.writeable
        assert (x.ctypes.data % LINE_BYTES == 0 or not x.size) and not x.any()


def test_a_device_aligns_by_itself() -> None:
    assert array_module(aligned_zeros((2, 3), np.float32, strict_cupy)) is strict_cupy
