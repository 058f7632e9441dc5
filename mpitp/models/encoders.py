"""Which encoders there are, and how one is put together from its config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.init import init_params
from mpitp.layers.site import Site
from mpitp.models import bert, distilbert, roberta
from mpitp.models.config import refuse_slips
from mpitp.models.encoder import TIED, Encoder, MakeHead, layer_costs, put_together
from mpitp.models.encoder_config import MASKED, EncoderConfig
from mpitp.models.kinds import is_encoder
from mpitp.models.layered import HfNames
from mpitp.models.names import HfPiece
from mpitp.models.nearest import what_it_is
from mpitp.models.stages import Chosen, Cutting, chosen_chunks


@dataclass(frozen=True, slots=True)
class EncoderType:
    """How one Hugging Face model_type is read, built and named. `classes`: of transformers, by head; `base`: what the
    names of the trunk's tensors begin with under a head.
    """

    read_config: Callable[[Mapping[str, Any]], EncoderConfig]
    heads: Mapping[str, MakeHead]
    hf_pieces: Callable[[EncoderConfig], dict[tuple[str, str], HfPiece]]
    copies: Callable[[EncoderConfig], dict[str, str]]
    classes: Mapping[str, str]
    base: str
    ignorable_tensors: tuple[str, ...]


def _type_of(module: ModuleType) -> EncoderType:
    m: Any = module
    return EncoderType(m.read_config, m.HEADS, m.hf_pieces, m.copies, m.CLASSES, m.BASE, m.IGNORABLE_TENSORS)


ENCODER_TYPES = {"bert": _type_of(bert), "roberta": _type_of(roberta), "distilbert": _type_of(distilbert)}


def encoder_config_from_hf(raw: Mapping[str, Any], own: Collection[str] = ()) -> EncoderConfig:
    """The config of a parsed config.json. Raises ConfigError for a model_type or a key that isn't supported.

    own: keys that the user has written here and now: one of them that nobody reads is a slip, and refused.
    """
    if not is_encoder(raw):
        raise ConfigError(
            f"config.json: model_type {raw.get('model_type')!r:.60} is no encoder; expected one of "
            f"{', '.join(ENCODER_TYPES)}{what_it_is(raw.get('model_type'))}"
        )
    config = ENCODER_TYPES[raw["model_type"]].read_config(raw)
    refuse_slips(config.model_type, config.unread, own)
    return config


def build_encoder(config: EncoderConfig, site: Site, cutting: Cutting = Cutting()) -> Encoder:  # noqa: B008  (frozen)
    """The encoder on a site, all parameters zero; of a mesh with stages, this rank's layers. Raises ConfigError for a
    site that can't be, PlacementError where layers don't fit one another, both before anything is allocated.
    """
    check_site(config, site)
    return _on(config, site, _chunks(config, site, cutting))


def abstract_encoder(config: EncoderConfig, site: Site, cutting: Cutting = Cutting()) -> Encoder:  # noqa: B008
    """The encoder without memory: to count its parameters, or look at its types."""
    return _on(config, site.abstract(), _chunks(config, site, cutting))


def new_encoder(config: EncoderConfig, site: Site, *, seed: int) -> Encoder:
    """An encoder with fresh weights, the same ones at every rank count."""
    model = build_encoder(config, site)
    init_params(model.named_params(), seed)
    return model


def check_site(config: EncoderConfig, site: Site) -> None:
    """Raise ConfigError for a site on which the model can't be right."""
    site.check_blocks({config.key(fact): getattr(config, fact) for fact in ("heads", "ffn_hidden", "vocab_size")})
    if site.num_blocks and config.head_dim == 1:
        raise ConfigError("invariant mode needs heads at least 2 wide: with 1, attention is made of single vectors")


def _chunks(config: EncoderConfig, site: Site, cutting: Cutting) -> Chosen:
    """This rank's layers, chunk by chunk. Checks the whole model's types."""
    whole = _on(config, site.abstract())
    return chosen_chunks(whole.types(), layer_costs(config, whole.layers), site, cutting)


def _on(config: EncoderConfig, site: Site, chosen: Chosen = Chosen()) -> Encoder:  # noqa: B008  (frozen)
    kind, tied = ENCODER_TYPES[config.model_type], TIED if config.head == MASKED else {}
    names = HfNames(kind.hf_pieces(config), kind.ignorable_tensors, tied)
    return put_together(config, site, names, kind.heads, chosen)
