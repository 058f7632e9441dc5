"""A model from a Hugging Face directory, laid over a group, in one call."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mpitp.backend.device import Device
from mpitp.checkpoint.hf import load_params, read_config, read_generation_config
from mpitp.comm.group import Group
from mpitp.errors import ConfigError
from mpitp.models import MODEL_TYPES, CausalLM, DecoderConfig, build_model, config_from_hf


def load_config(directory: str | Path) -> DecoderConfig:
    """The config of a Hugging Face directory. The end-of-text ids of generation_config.json, where given, replace those
    of config.json: several models name all of them only there.
    """
    raw = read_config(directory)
    try:
        config = config_from_hf(raw)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error
    ids = _ids(read_generation_config(directory).get("eos_token_id"))
    return dataclasses.replace(config, eos_ids=ids) if ids else config


def load_model(
    directory: str | Path,
    group: Group,
    *,
    dtype: str = "float32",
    device: Device | None = None,
    invariant_blocks: int = 0,
    config: DecoderConfig | None = None,
) -> CausalLM:
    """The directory's model with its weights; each rank of `group` reads only the slices it holds.

    `config` replaces `load_config(directory)`, for other dropout rates. Raises ConfigError for a model that isn't
    supported, FileError for a directory that is incomplete or contradictory.
    """
    config = config or load_config(directory)
    model = build_model(config, group, dtype=dtype, device=device, invariant_blocks=invariant_blocks)
    pieces = model.hf_pieces()
    copies = {"lm_head.weight": pieces["embedding.weight", "vocab"].tensor} if config.tied else {}
    load_params(model, directory, model.ignorable_tensors, copies)
    return model


def load_blocks(
    directory: str | Path,
    group: Group,
    layers: range,
    *,
    dtype: str = "float32",
    device: Device | None = None,
    invariant_blocks: int = 0,
    config: DecoderConfig | None = None,
) -> CausalLM:
    """A model of the directory's blocks `layers` alone, with its embedding, final norm and head.

    The tensors of the other blocks are left alone. `config` is the whole model's.
    """
    whole = config or load_config(directory)
    few = dataclasses.replace(whole, num_layers=len(layers))
    model = build_model(few, group, dtype=dtype, device=device, invariant_blocks=invariant_blocks)
    pieces = MODEL_TYPES[whole.model_type].hf_pieces(whole)
    for name, part in list(model.pieces):
        model.pieces[name, part] = pieces[_renumbered(name, layers.start), part]
    load_params(model, directory, ("*",))
    return model


def _renumbered(name: str, offset: int) -> str:
    """The name of a parameter with `offset` added to the number of its block."""
    words = name.split(".")
    if words[0] == "blocks":
        words[1] = str(int(words[1]) + offset)
    return ".".join(words)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
