from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from mpitp.backend.device import make_device
from mpitp.errors import ConfigError, LaunchError


class CUDARuntimeError(RuntimeError):
    pass


def fake_cupy(monkeypatch: pytest.MonkeyPatch, count: int | Exception) -> list[int]:
    """A module `cupy` with that many GPUs (or that error); the list gets the numbers of the GPUs chosen."""
    used: list[int] = []

    def device(index: int) -> SimpleNamespace:
        return SimpleNamespace(use=lambda: used.append(index))

    def get_count() -> int:
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=get_count)
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=runtime, Device=device)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return used


def test_cpu() -> None:
    device = make_device("cpu", 3)
    assert (device.name, device.xp) == ("cpu", np)


def test_gpu_is_chosen_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    used = fake_cupy(monkeypatch, 4)
    device = make_device("gpu", 6)
    assert used == [2]
    assert (device.name, device.xp) == ("gpu", sys.modules["cupy"])


def test_gpu_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(LaunchError, match="device gpu needs CuPy") as raised:
        make_device("gpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("count", [0, CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")])
def test_cupy_without_gpu(count: int | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, count)
    with pytest.raises(LaunchError, match="device gpu: CuPy finds no") as raised:
        make_device("gpu")
    assert "\n" not in str(raised.value)


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match='device = "tpu" is unknown; expected "cpu" or "gpu"'):
        make_device("tpu")
