"""An encoder or a vision transformer with its first weights, to be made on any site: stored ones, or fresh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mpitp.checkpoint.encoder import fill_under_head, load_encoder_config
from mpitp.checkpoint.hf_directory import read_config
from mpitp.checkpoint.vision import fill_vision_under_head, load_vision_config
from mpitp.layers.gathered import deal_weights
from mpitp.layers.init import init_params
from mpitp.layers.site import Site
from mpitp.models.encoder import Encoder
from mpitp.models.encoder_config import EncoderConfig
from mpitp.models.encoders import abstract_encoder, build_encoder
from mpitp.models.encoders import check_site as check_encoder_site
from mpitp.models.kinds import is_encoder, is_vision
from mpitp.models.layered import LayeredModel
from mpitp.models.registry import recompute_blocks
from mpitp.models.stages import Cutting
from mpitp.models.vision import Vision, abstract_vision, build_vision
from mpitp.models.vision import check_site as check_vision_site
from mpitp.models.vision_config import VisionConfig


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """A model from `directory`, under the head that `config` names, or fresh from `seed` where that is None.

    `cutting`: into the stages of a mesh that has several. `deals_weights`: to the ranks of the axes of data.
    `recompute`: which blocks forget (`layers/recompute.py`).
    """

    config: EncoderConfig | VisionConfig
    directory: Path | None
    seed: int
    cutting: Cutting = Cutting()
    deals_weights: bool = False
    recompute: str = "none"

    @property
    def chosen_blocks(self) -> range:
        """All of them."""
        return range(self.config.num_layers)

    def abstract(self, site: Site, num_layers: int | None = None) -> LayeredModel:
        """The model, or one of so many of its blocks, on a site without memory; of a mesh with stages, this rank's
        layers.
        """
        config = self.config if num_layers is None else replace(self.config, num_layers=num_layers)
        if isinstance(config, VisionConfig):
            return abstract_vision(config, site, self.cutting)
        return abstract_encoder(config, site, self.cutting)

    def check(self, site: Site) -> None:
        """Raise ConfigError where the model can't be cut into the stages of such a site. Nothing is allocated."""
        if isinstance(self.config, VisionConfig):
            check_vision_site(self.config, site)
        else:
            check_encoder_site(self.config, site)
        self.abstract(site)

    def make(self, site: Site) -> LayeredModel:
        """The model on `site`, a collective over its ranks."""
        model = recompute_blocks(self._built(site), self.recompute)
        if self.deals_weights:
            deal_weights(model.layers, site.mesh)
        if self.directory is None:
            init_params(model.named_params(), self.seed)
        elif isinstance(model, Vision):
            fill_vision_under_head(model, self.directory, self.seed)
        else:
            fill_under_head(model, self.directory, self.seed)
        return model

    def _built(self, site: Site) -> Encoder | Vision:
        if isinstance(self.config, VisionConfig):
            return build_vision(self.config, site, self.cutting)
        return build_encoder(self.config, site, self.cutting)


def load_other_config(directory: Path) -> EncoderConfig | VisionConfig | None:
    """The config of a directory's encoder or vision transformer; None: it holds another kind of model."""
    raw = read_config(directory)
    if is_vision(raw):
        return load_vision_config(directory)
    return load_encoder_config(directory) if is_encoder(raw) else None
