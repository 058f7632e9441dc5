"""Weights in 8 or 4 bits in a Hugging Face directory: what config.json says of them as its `quantization_config`, and
how their tensors are named.

    {"quant_method": "groupwise", "bits": 4, "group_size": 32, "table_bits": 8, "symmetric": true}

A matrix X.weight is stored as X.weight, its codes, and X.weight_scale, its scales (`ops/groupwise.py`). Where
"symmetric" is false, X.weight_scale has twice as many columns: each group's scale and, behind it, its least value.
Tables of the vocabulary always have 8 bits and scales alone, vectors are floats as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.expert_matrices import SCALES
from mpitp.models.names import HfPiece
from mpitp.ops.groupwise import Grouping

KEY, METHOD = "quantization_config", "groupwise"


def grouping_entry(grouping: Grouping) -> dict[str, Any]:
    """What config.json says of weights that are rounded so."""
    return {
        "quant_method": METHOD,
        "bits": grouping.bits,
        "group_size": grouping.size,
        "table_bits": 8,
        "symmetric": not grouping.has_least,
    }


def without_grouping(raw: Mapping[str, Any]) -> tuple[dict[str, Any], Grouping | None]:
    """The config of the same model in floats, and how its weights are rounded (None: not, or by another method, which
    stays in the config to be refused). Raises ConfigError for an entry that says something else.
    """
    entry = raw.get(KEY)
    if not isinstance(entry, Mapping) or entry.get("quant_method") != METHOD:
        return dict(raw), None
    bits, size = entry.get("bits"), entry.get("group_size")
    grouping = None
    if type(bits) is int and type(size) is int:
        grouping = Grouping(bits, size, has_least=entry.get("symmetric") is False)
    if grouping is None or dict(entry) != grouping_entry(grouping):
        known = grouping_entry(Grouping(8))
        raise ConfigError(f"config.json: {KEY}={dict(entry)!r:.200} is not understood; expected such as {known!r}")
    return {key: value for key, value in raw.items() if key != KEY}, grouping


def with_scales(pieces: Mapping[tuple[str, str], HfPiece]) -> dict[tuple[str, str], HfPiece]:
    """The names of all tensors, with those of the scales that stand beside matrices."""
    scales = {
        (scales_of(name), part): replace(piece, tensor=_scale_of(piece.tensor))
        for (name, part), piece in pieces.items()
        if name.endswith("weight") or piece.stacked
    }
    return {**pieces, **scales}


def scales_of(name: str) -> str:
    """What the parameter of the scales is called beside that of the codes: "weight_scale", "gate_up_scale"."""
    return name + SCALES


def _scale_of(tensor: str) -> str:
    return f"{tensor}_scale"
