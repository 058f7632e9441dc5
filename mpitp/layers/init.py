"""Initial values, equal in every layout: each element is drawn at its own index of the global tensor's stream."""

from __future__ import annotations

from collections.abc import Iterable

from mpitp.backend.arrays import array_module
from mpitp.backend.rng import normal_box, stream_key
from mpitp.layers.param import Param


def init_params(named_params: Iterable[tuple[str, Param]], seed: int) -> None:
    """Fill every parameter: normal with its `init_std`, or the constant `init_value` where that is 0."""
    for name, param in named_params:
        if not param.init_std:
            param.data[...] = param.init_value
            continue
        wide = param.grad_dtype  # drawn in it, and rounded once
        for part, place in param.placement.places():
            key = stream_key(seed, f"init/{name}/{part.name}")
            values = normal_box(part.shape, part.held, key, wide, array_module(param.data))
            param.data[place] = values * wide.type(param.init_std)
