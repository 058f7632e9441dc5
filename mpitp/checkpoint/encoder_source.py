"""An encoder or a vision transformer with its first weights, to be made on any site: stored ones, or fresh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mpitp.checkpoint.encoder import load_encoder_config, load_under_head
from mpitp.checkpoint.hf_directory import read_config
from mpitp.checkpoint.vision import load_vision_config, load_vision_under_head
from mpitp.layers.site import Site
from mpitp.models.encoder_config import EncoderConfig
from mpitp.models.encoders import abstract_encoder, is_encoder, new_encoder
from mpitp.models.layered import LayeredModel
from mpitp.models.vision import abstract_vision, new_vision
from mpitp.models.vision_config import VisionConfig, is_vision


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """A model from `directory`, under the head that `config` names, or fresh from `seed` where that is None."""

    config: EncoderConfig | VisionConfig
    directory: Path | None
    seed: int

    @property
    def chosen_blocks(self) -> range:
        """All of them."""
        return range(self.config.num_layers)

    def abstract(self, site: Site, num_layers: int | None = None) -> LayeredModel:
        """The model, or one of so many of its blocks, on a site without memory."""
        config = self.config if num_layers is None else replace(self.config, num_layers=num_layers)
        return abstract_vision(config, site) if isinstance(config, VisionConfig) else abstract_encoder(config, site)

    def make(self, site: Site) -> LayeredModel:
        """The model on `site`."""
        if isinstance(self.config, VisionConfig):
            if self.directory is None:
                return new_vision(self.config, site, seed=self.seed)
            return load_vision_under_head(self.directory, site, self.config, self.seed)
        if self.directory is None:
            return new_encoder(self.config, site, seed=self.seed)
        return load_under_head(self.directory, site, self.config, self.seed)[0]


def load_other_config(directory: Path) -> EncoderConfig | VisionConfig | None:
    """The config of a directory's encoder or vision transformer; None: it holds another kind of model."""
    raw = read_config(directory)
    if is_vision(raw):
        return load_vision_config(directory)
    return load_encoder_config(directory) if is_encoder(raw) else None
