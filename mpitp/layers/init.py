"""Initial values, equal in every layout: each element is drawn at its own index of the global tensor's stream."""

from __future__ import annotations

from collections.abc import Iterable

from mpitp.backend.arrays import array_module
from mpitp.backend.rng import normal_rows, stream_key
from mpitp.layers.param import Param


def init_params(named_params: Iterable[tuple[str, Param]], seed: int) -> None:
    """Fill every parameter: normal with its `init_std`, or the constant `init_value` where that is 0."""
    for name, param in named_params:
        if not param.init_std:
            param.data[...] = param.init_value
            continue
        for part, rows in param.spec.local_parts():
            key = stream_key(seed, f"init/{name}/{part.name}")
            shape, dim = param.spec.global_shape(part), param.spec.dim
            values = normal_rows(shape, dim, part.held, key, param.data.dtype, array_module(param.data))
            param.spec.view(param.data, rows)[...] = values * param.data.dtype.type(param.init_std)
