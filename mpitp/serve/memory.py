"""How many tokens the cache has room for: counted before anything is computed, alike on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.comm.environment import launch_claim
from mpitp.comm.group import Group
from mpitp.errors import ConfigError
from mpitp.infer.blocks import BLOCK, blocks_of
from mpitp.layers.attention import AttentionHeads
from mpitp.layers.layer import Layer
from mpitp.models.model import CausalLM

SHARE = 0.4  # of the memory that is free when the weights are there


def token_bytes(models: Sequence[CausalLM]) -> int:
    """Of one token's keys and values on this rank, in all models that read the text."""
    return sum(
        2 * len(layer.heads.kv) * layer.head_dim * model.dtype.itemsize
        for model in models
        for layer in _layers(model.all_layers().values())
        if isinstance(layer, AttentionHeads)
    )


def _layers(layers: Any) -> Iterator[Layer]:
    for layer in layers:
        if isinstance(layer, Layer):
            yield layer
            yield from _layers(layer.children().values())


def cache_blocks(models: Sequence[CausalLM], world: Group, wanted_tokens: int | None, texts: int) -> int:
    """Blocks of the cache: for `wanted_tokens`, or (None) what `texts` of the first model's full length need, as far as
    this share of the free memory goes. A collective. Raises ConfigError for a cache that can't be had.
    """
    positions, each_bytes = models[0].config.cached_positions, token_bytes(models)
    free = available_bytes()
    claim = launch_claim(os.environ)
    share = SHARE * free / max(1, claim.local_size or world.size) if free else float("inf")
    fits = np.array([min(share // max(1, each_bytes), 2**40)], np.int64)
    most = int(world.all_reduce(fits, op="min")[0])
    if wanted_tokens is None:
        wanted_tokens = min(texts * positions, most)
    elif wanted_tokens > most / SHARE:
        raise ConfigError(f"a cache of {wanted_tokens} tokens exceeds the free memory; it has room for {most}")
    blocks = min(blocks_of(wanted_tokens), texts * blocks_of(positions))
    if blocks < 1:
        raise ConfigError(f"no memory is left for a cache: a block of {BLOCK} tokens needs {BLOCK * each_bytes} bytes")
    return blocks


def available_bytes() -> int:
    """Memory that this machine, or this container, has left; 0: it isn't known."""
    found = [value for value in (_meminfo(), _cgroup()) if value is not None]
    return min(found, default=0)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup() -> int | None:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdecimal() and used.isdecimal() else None
