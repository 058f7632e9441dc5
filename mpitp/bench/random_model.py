"""A model of given sizes with quickly drawn weights: what they are doesn't matter to its speed."""

from __future__ import annotations

import zlib

import numpy as np

from mpitp.backend.arrays import array_module, from_host
from mpitp.comm.group import Group
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.registry import build_model


def random_model(config: DecoderConfig, group: Group, dtype: str, invariant_blocks: int = 0) -> CausalLM:
    """Normal weights with the config's standard deviation. Replicas on several ranks are equal."""
    model = build_model(config, group, dtype=dtype, invariant_blocks=invariant_blocks)
    for name, param in model.named_params():
        param.data[...] = param.init_value
        if not param.init_std:
            continue
        for part, rows in param.spec.local_parts():
            view = param.spec.view(param.data, rows)
            for block in part.blocks:  # a replicated KV head is a block of its own, drawn by its global place
                local = slice(block.start - part.held.start, block.stop - part.held.start)
                target = param.spec.view(view, local)
                rng = np.random.default_rng([zlib.crc32(f"{name}/{part.name}".encode()), block.start])
                drawn = rng.standard_normal(target.shape, np.float32) * np.float32(param.init_std)
                target[...] = from_host(drawn.astype(param.data.dtype), array_module(target))
    return model
