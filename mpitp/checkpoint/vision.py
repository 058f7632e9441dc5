"""Vision transformers from Hugging Face directories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpitp.checkpoint.hf import load_params
from mpitp.checkpoint.hf_directory import read_config
from mpitp.errors import ConfigError
from mpitp.layers.init import init_params
from mpitp.layers.param import Param
from mpitp.layers.site import Site
from mpitp.models.names import HfPiece
from mpitp.models.vision import Vision, build_vision, hf_pieces
from mpitp.models.vision_config import VisionConfig, vision_config_from_hf


def load_vision_config(directory: str | Path) -> VisionConfig:
    """The config of a vision transformer's directory."""
    try:
        return vision_config_from_hf(read_config(directory))
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def load_vision(directory: str | Path, site: Site, *, config: VisionConfig | None = None) -> Vision:
    """The directory's model with its head; `config` replaces its own, for another image size.

    Raises ConfigError for a model that isn't supported, FileError for a directory that is incomplete or contradictory.
    """
    model = build_vision(config or load_vision_config(directory), site)
    load_params(model, directory, model.ignorable_tensors)
    return model


@dataclass(frozen=True, slots=True)
class _Trunk:
    """All parameters but the head's, called as a directory with the head `stored` has it."""

    model: Vision
    stored: VisionConfig

    def named_params(self) -> Iterator[tuple[str, Param]]:
        return ((name, param) for name, param in self.model.named_params() if not name.startswith("head."))

    def hf_pieces(self) -> dict[tuple[str, str], HfPiece]:
        return hf_pieces(self.stored)


def fill_vision_under_head(model: Vision, directory: str | Path, seed: int) -> None:
    """Fill a model from a directory's trunk; its head is made from `seed` unless the directory has the same."""
    stored, config = load_vision_config(directory), model.config
    if (stored.head, stored.labels) == (config.head, config.labels):
        load_params(model, directory, model.ignorable_tensors)
        return
    init_params(model.named_params(), seed)
    load_params(_Trunk(model, stored), directory, ("*",))
