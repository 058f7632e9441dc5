"""Global tensors and the ranks' parts of them, by `Placement` alone: what every comparison of layouts stands on."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.backend.device import Device
from mpitp.comm import Group
from mpitp.layers.param import Param
from mpitp.layers.placement import Placement, index_of
from tests import strict_cupy

Named = Iterable[tuple[str, Param]]


class StrictDevice(Device):
    """The device of the stand-in for CuPy."""

    name = "strict"
    xp = strict_cupy

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return strict_cupy.zeros(shape, dtype)


def random_array(name: str, shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    """Normal numbers (float64) that depend on the name and the shape alone."""
    return std * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def fill(named_params: Named, std: float = 0.3) -> None:
    """Give every parameter its share of one random global tensor, around the constant it would start from."""
    for name, param in named_params:
        for part, place in param.placement.places():
            whole = random_array(f"{name}/{part.name}", part.shape, std) + param.init_value
            local = np.ascontiguousarray(whole[part.index], dtype=param.data.dtype)
            param.data[place] = _as_module_of(param.data, local)


def _as_module_of(array: Any, host: np.ndarray) -> Any:
    return host if isinstance(array, np.ndarray) else strict_cupy.asarray(host)


def assemble(group: Group, arrays: Iterable[tuple[str, Placement, Any]]) -> dict[str, np.ndarray]:
    """Every global tensor ("name/part") on every rank.

    Fails unless each element is owned exactly once and every replica has the bits of the owner.
    """
    mine = [piece for name, placement, array in arrays for piece in _pieces(name, placement, to_host(array))]
    everyones = [piece for pieces in group.all_gather_objects(mine) for piece in pieces]
    whole: dict[str, np.ndarray] = {}
    owners: dict[str, np.ndarray] = {}
    for key, part, is_owner, values in everyones:
        counts = owners.setdefault(key, np.zeros(part.shape, int))
        target = whole.setdefault(key, np.full(part.shape, np.nan, values.dtype))
        if is_owner:
            counts[index_of(part.owned)] += 1
            target[index_of(part.owned)] = values[part.within(part.owned)]
    for key, counts in owners.items():
        assert (counts == 1).all(), f"{key}: owners of each element, which must be 1: {counts}"
    for key, part, _, values in everyones:
        np.testing.assert_array_equal(values, whole[key][part.index], f"{key}: a replica differs from its owner")
    return whole


def _pieces(name: str, placement: Placement, array: np.ndarray) -> Iterable[tuple[Any, ...]]:
    for part, place in placement.places():
        yield f"{name}/{part.name}", part, placement.is_owner, array[place].copy()


def weights(group: Group, named_params: Named) -> dict[str, np.ndarray]:
    """All global weights, copied."""
    return assemble(group, [(name, param.placement, param.data) for name, param in named_params])


def gradients(group: Group, named_params: Named) -> dict[str, np.ndarray]:
    """All global gradients, copied; every parameter must have one, of its own shape and (wide) dtype."""
    named_params = list(named_params)
    for name, param in named_params:
        assert param.grad is not None, f"{name} got no gradient"
        assert (param.grad.shape, param.grad.dtype) == (param.data.shape, param.grad_dtype), name
    return assemble(group, [(name, param.placement, param.grad) for name, param in named_params])


def largest_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """Of each array: the largest absolute difference, divided by the largest expected value where that is above 1."""
    assert set(found) == set(expected), f"only on one side: {set(found) ^ set(expected)}"
    result = {}
    for name, want in expected.items():
        got, want = np.asarray(found[name], np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        result[name] = float(np.abs(got - want).max(initial=0.0)) / scale
    return result


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """No difference above the tolerance (NaN is one); the differing arrays are named."""
    differences = largest_differences(found, expected)
    assert {name: value for name, value in differences.items() if not value <= tolerance} == {}


def assert_same_bits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Equal to the last bit, dtype and sign of zero included; the differing arrays are named."""
    assert set(found) == set(expected)
    different = [
        name
        for name, want in expected.items()
        if (np.asarray(found[name]).dtype, np.asarray(found[name]).tobytes())
        != (np.asarray(want).dtype, np.asarray(want).tobytes())
    ]
    assert different == [], "the bits differ"
