"""Which kind of model a config.json is of, told before anything of that kind is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENCODERS = ("bert", "roberta", "distilbert")
ENCODER_DECODERS = ("t5", "bart", "marian")
VISION = ("vit", "dinov2")


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of an encoder."""
    return _is_among(raw, ENCODERS)


def is_encoder_decoder(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of a model with an encoder and a decoder."""
    return _is_among(raw, ENCODER_DECODERS)


def is_vision(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of a vision transformer."""
    return _is_among(raw, VISION)


def _is_among(raw: Mapping[str, Any], types: tuple[str, ...]) -> bool:
    model_type = raw.get("model_type")
    return isinstance(model_type, str) and model_type in types
