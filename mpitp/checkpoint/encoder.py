"""Encoders from Hugging Face directories: whole ones, their trunk alone, or a trunk under a head of another kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpitp.checkpoint.hf import expected_tensors, load_params
from mpitp.checkpoint.hf_directory import HfWeights, read_config
from mpitp.errors import ConfigError
from mpitp.layers.init import init_params
from mpitp.layers.param import Param
from mpitp.layers.site import Site
from mpitp.models.encoder import Encoder
from mpitp.models.encoder_config import FEATURES, TOKENS, EncoderConfig
from mpitp.models.encoders import ENCODER_TYPES, build_encoder, encoder_config_from_hf
from mpitp.models.names import HfPiece

ANY_TENSOR = ("*",)


@dataclass(frozen=True, slots=True)
class SomeParams:
    """Those of a model's parameters whose names are given, to be loaded by themselves.

    `stored`: of the directory, where the trunk's tensors are called as its own head has it.
    """

    model: Encoder
    names: Collection[str]
    stored: EncoderConfig

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """The chosen ones, in the model's order."""
        return ((name, param) for name, param in self.model.named_params() if name in self.names)

    def hf_pieces(self) -> dict[tuple[str, str], HfPiece]:
        """Where their parts lie."""
        return self.model.hf_pieces() | _trunk_pieces(self.model, self.stored)


def load_encoder_config(directory: str | Path) -> EncoderConfig:
    """The config of an encoder's directory."""
    try:
        return encoder_config_from_hf(read_config(directory))
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def load_encoder(directory: str | Path, site: Site, *, config: EncoderConfig | None = None) -> Encoder:
    """The directory's encoder with its head; each rank of the site reads only the slices it holds.

    `config` replaces `load_encoder_config(directory)`, for other dropout rates. Raises ConfigError for a model that
    isn't supported, FileError for a directory that is incomplete or contradictory.
    """
    model = build_encoder(config or load_encoder_config(directory), site)
    _fill(model, directory)
    return model


def _fill(model: Encoder, directory: str | Path) -> None:
    copies = ENCODER_TYPES[model.config.model_type].copies(model.config)
    load_params(model, directory, model.ignorable_tensors, copies)


def load_trunk(directory: str | Path, site: Site) -> Encoder:
    """The directory's encoder with its embeddings and blocks alone filled, whatever head is on it (to embed)."""
    stored = load_encoder_config(directory)
    model = build_encoder(stored.with_head(FEATURES), site)
    load_params(SomeParams(model, trunk_names(model), stored), directory, ANY_TENSOR)
    return model


def load_under_head(directory: str | Path, site: Site, config: EncoderConfig, seed: int) -> tuple[Encoder, list[str]]:
    """The directory's trunk under the head that `config` names; and the parameters that are fresh, made from `seed`."""
    model = build_encoder(config, site)
    return model, fill_under_head(model, directory, seed)


def fill_under_head(model: Encoder, directory: str | Path, seed: int) -> list[str]:
    """Fill a model from a directory whose trunk is under its own head or another; the parameters that are fresh, made
    from `seed`. What of the head the directory holds in the wanted shape is taken from there, unless it has other
    classes.
    """
    stored, config = load_encoder_config(directory), model.config
    if (stored.head, stored.labels) == (config.head, config.labels):
        _fill(model, directory)
        return []
    init_params(model.named_params(), seed)
    trunk, tensors = trunk_names(model), _stored_shapes(directory)
    base = ENCODER_TYPES[config.model_type].base
    head = [name for name, _ in model.named_params() if name not in trunk]
    found = [name for name in head if _is_stored(SomeParams(model, [name], stored), tensors, base)]
    load_params(SomeParams(model, {*trunk, *found}, stored), directory, ANY_TENSOR)
    return [name for name in head if name not in found]


def trunk_names(model: Encoder) -> set[str]:
    """The names of the parameters of embeddings and blocks."""
    return {name for name, _ in model.named_params() if _top(model, name) in model.trunk}


def _top(model: Encoder, name: str) -> str:
    return next(top for top in model.layers if name.startswith(top + "."))


def _trunk_pieces(model: Encoder, stored: EncoderConfig) -> dict[tuple[str, str], HfPiece]:
    pieces, trunk = ENCODER_TYPES[stored.model_type].hf_pieces(stored), trunk_names(model)
    return {(name, part): piece for (name, part), piece in pieces.items() if name in trunk}


def _stored_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    with HfWeights(directory) as weights:
        return weights.shapes()


def _is_stored(chosen: SomeParams, stored: Mapping[str, tuple[int, ...]], base: str) -> bool:
    """Whether a parameter of the head lies in the directory: the pooler may, and a transform; a classifier doesn't,
    since its classes are others.
    """
    (name,), model = chosen.names, chosen.model
    is_classifier = name.startswith("head.classifier.") or (model.config.head == TOKENS and name.startswith("head."))
    wanted = expected_tensors(chosen)
    return not is_classifier and all(
        stored.get(tensor, stored.get(tensor.removeprefix(base))) == shape for tensor, shape in wanted.items()
    )
