"""A model of given sizes with quickly drawn weights: what they are doesn't matter to its speed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from mpitp.backend.arrays import array_module, from_host
from mpitp.layers.param import Param
from mpitp.layers.site import Site
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.registry import build_model


def random_model(config: DecoderConfig, site: Site) -> CausalLM:
    """Normal weights with the config's standard deviation. Replicas on several ranks are equal."""
    model = build_model(config, site)
    draw_weights(model.named_params())
    return model


def draw_weights(named_params: Iterable[tuple[str, Param]]) -> None:
    """Normal weights of any model."""
    for name, param in named_params:
        param.data[...] = param.init_value
        if not param.init_std:
            continue
        for part, place in param.placement.places():
            for box in part.blocks():  # a replicated KV head is a block of its own, drawn by its global place
                target = param.data[place][part.within(box)]
                places = [rows.start for rows in box]
                rng = np.random.default_rng([zlib.crc32(f"{name}/{part.name}".encode()), *places])
                drawn = rng.standard_normal(target.shape, np.float32) * np.float32(param.init_std)
                target[...] = from_host(drawn.astype(param.data.dtype), array_module(target))
