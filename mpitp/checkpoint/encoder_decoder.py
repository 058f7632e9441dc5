"""Models with an encoder and a decoder from Hugging Face directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpitp.checkpoint.hf import load_params
from mpitp.checkpoint.hf_directory import read_config
from mpitp.errors import ConfigError
from mpitp.layers.gathered import deal_weights
from mpitp.layers.init import init_params
from mpitp.layers.site import Site
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.encoder_decoders import (
    ENCODER_DECODER_TYPES,
    abstract_encoder_decoder,
    build_encoder_decoder,
    check_site,
    encoder_decoder_config_from_hf,
    recompute_both,
)
from mpitp.models.stages import Cutting


def load_encoder_decoder_config(directory: str | Path) -> EncoderDecoderConfig:
    """The config of a directory."""
    try:
        return encoder_decoder_config_from_hf(read_config(directory))
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def load_encoder_decoder(
    directory: str | Path, site: Site, *, config: EncoderDecoderConfig | None = None
) -> EncoderDecoder:
    """The directory's model; each rank of the site reads only the slices it holds.

    `config` replaces the directory's own, for other dropout rates. Raises ConfigError for a model that isn't supported,
    FileError for a directory that is incomplete or contradictory.
    """
    config = config or load_encoder_decoder_config(directory)
    model = build_encoder_decoder(config, site)
    _load(model, directory)
    return model


def _load(model: EncoderDecoder, directory: str | Path) -> None:
    copies = ENCODER_DECODER_TYPES[model.config.model_type].copies(model.config)
    load_params(model, directory, model.ignorable_tensors, copies)


@dataclass(frozen=True, slots=True)
class EncoderDecoderSource:
    """A model from `directory`, or fresh from `seed` where that is None, to be made on any site.

    `recompute`: which blocks forget (`layers/recompute.py`). `deals_weights`: to the ranks of the axes of data.
    `cutting`: into the stages of a mesh that has several; encoder's blocks are counted first.
    """

    config: EncoderDecoderConfig
    directory: Path | None = None
    seed: int = 0
    recompute: str = "none"
    deals_weights: bool = False
    cutting: Cutting = Cutting()

    @property
    def chosen_blocks(self) -> range:
        """All of the decoder's."""
        return range(self.config.decoder.num_layers)

    def abstract(self, site: Site) -> EncoderDecoder:
        """The model on a site without memory; of a mesh with stages, this rank's layers."""
        return abstract_encoder_decoder(self.config, site, self.cutting)

    def check(self, site: Site) -> None:
        """Raise ConfigError where the model can't be laid on such a site. Nothing is allocated."""
        check_site(self.config, site)
        self.abstract(site)

    def make(self, site: Site) -> EncoderDecoder:
        """The model on `site`, a collective over its ranks."""
        model = recompute_both(build_encoder_decoder(self.config, site, self.cutting), self.recompute)
        if self.deals_weights:
            deal_weights(model.layers, site.mesh)
        if self.directory is None:
            init_params(model.named_params(), self.seed)
        else:
            _load(model, self.directory)
        return model
