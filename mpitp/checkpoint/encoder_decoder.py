"""Models with an encoder and a decoder from Hugging Face directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpitp.checkpoint.hf import load_params
from mpitp.checkpoint.hf_directory import read_config
from mpitp.errors import ConfigError
from mpitp.layers.site import Site
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.encoder_decoders import (
    ENCODER_DECODER_TYPES,
    build_encoder_decoder,
    encoder_decoder_config_from_hf,
    new_encoder_decoder,
)


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
    load_params(model, directory, model.ignorable_tensors, ENCODER_DECODER_TYPES[config.model_type].copies(config))
    return model


@dataclass(frozen=True, slots=True)
class EncoderDecoderSource:
    """A model from `directory`, or fresh from `seed` where that is None, to be made on any site."""

    config: EncoderDecoderConfig
    directory: Path | None = None
    seed: int = 0

    def make(self, site: Site) -> EncoderDecoder:
        """The model on `site`."""
        if self.directory is None:
            return new_encoder_decoder(self.config, site, seed=self.seed)
        return load_encoder_decoder(self.directory, site, config=self.config)
