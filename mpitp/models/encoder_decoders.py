"""Which models with an encoder and a decoder there are, and how one is put together from its config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.crossing import OnSource
from mpitp.layers.init import init_params
from mpitp.layers.layer import Layer
from mpitp.layers.recompute import recomputing
from mpitp.layers.site import Site
from mpitp.models import bart, t5
from mpitp.models.config import refuse_slips
from mpitp.models.encoder_decoder import HEAD, EncoderDecoder
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.kinds import is_encoder_decoder
from mpitp.models.layered import HfNames
from mpitp.models.names import HfPiece
from mpitp.models.nearest import what_it_is
from mpitp.models.pair_layers import layer_makers, tied_params
from mpitp.models.stages import Chosen, Cutting, chosen_chunks, token_costs


@dataclass(frozen=True, slots=True)
class PairType:
    """How one Hugging Face model_type is read and named. `architecture`: the class of transformers."""

    read_config: Callable[[Mapping[str, Any]], EncoderDecoderConfig]
    hf_pieces: Callable[[EncoderDecoderConfig], dict[tuple[str, str], HfPiece]]
    copies: Callable[[EncoderDecoderConfig], dict[str, str]]
    architecture: str
    ignorable_tensors: tuple[str, ...]


def _type_of(module: ModuleType) -> PairType:
    m: Any = module
    return PairType(m.read_config, m.hf_pieces, m.copies, m.ARCHITECTURE, m.IGNORABLE_TENSORS)


ENCODER_DECODER_TYPES = {
    "t5": _type_of(t5),
    "bart": _type_of(bart),
    "marian": PairType(
        bart.read_marian_config,
        bart.hf_pieces,
        bart.copies,
        bart.MARIAN_ARCHITECTURE,
        bart.MARIAN_IGNORABLE_TENSORS,
    ),
}


def encoder_decoder_config_from_hf(raw: Mapping[str, Any], own: Collection[str] = ()) -> EncoderDecoderConfig:
    """The config of a parsed config.json. Raises ConfigError for a model_type or a key that isn't supported.

    own: keys that the user has written here and now: one of them that nobody reads is a slip, and refused.
    """
    if not is_encoder_decoder(raw):
        raise ConfigError(
            f"config.json: model_type {raw.get('model_type')!r:.60} is none with an encoder and a decoder; expected "
            f"one of {', '.join(ENCODER_DECODER_TYPES)}{what_it_is(raw.get('model_type'))}"
        )
    kind = ENCODER_DECODER_TYPES[raw["model_type"]]
    config = kind.read_config(raw)
    refuse_slips(config.model_type, config.unread, own)
    more = {"decoder_start_token_id": config.start_id, "is_encoder_decoder": True}
    return replace(config, hf={**config.hf, "architectures": [kind.architecture], **more})


def build_encoder_decoder(
    config: EncoderDecoderConfig,
    site: Site,
    cutting: Cutting = Cutting(),  # noqa: B008  (frozen)
) -> EncoderDecoder:
    """The model on a site, all parameters zero; of a mesh with stages, this rank's layers. Raises ConfigError for a
    site that can't be, PlacementError where layers don't fit one another, both before anything is allocated.
    """
    check_site(config, site)
    return _on(config, site, _chunks(config, site, cutting))


def abstract_encoder_decoder(
    config: EncoderDecoderConfig,
    site: Site,
    cutting: Cutting = Cutting(),  # noqa: B008  (frozen)
) -> EncoderDecoder:
    """The model without memory: to count its parameters, or look at its types."""
    return _on(config, site.abstract(), _chunks(config, site, cutting))


def abstract_pair_layers(config: EncoderDecoderConfig, site: Site, names: Sequence[str]) -> EncoderDecoder:
    """Some of the model's layers, in forward order, without memory and a look at their types: to count what they hold
    where that is asked hundreds of times.
    """
    return _on(config, site.abstract(), Chosen([(tuple(names), site.batch_type)]))


def layer_costs(config: EncoderDecoderConfig, layers: Mapping[str, Layer]) -> dict[str, float]:
    """Multiplications a token that each layer takes forward (`stages.token_costs`); a lookup takes none."""
    lookups = ("embedding", "positions", "encoder.embedding", "encoder.positions")
    return token_costs(layers, dict.fromkeys(lookups, float(config.hidden_size)), {HEAD: config.vocab_size})


def new_encoder_decoder(config: EncoderDecoderConfig, site: Site, *, seed: int) -> EncoderDecoder:
    """A model with fresh weights, the same ones at every rank count."""
    model = build_encoder_decoder(config, site)
    init_params(model.named_params(), seed)
    return model


def recompute_both(model: EncoderDecoder, wish: str) -> EncoderDecoder:
    """The model, its blocks of both sides wrapped as a run file wishes: see `layers/recompute.py`."""
    wrap = recomputing(wish)
    for name, layer in model.layers.items():
        side, is_block, number = name.rpartition("blocks.")
        if is_block and side:
            assert isinstance(layer, OnSource)
            layer.inner = wrap(int(number), layer.inner)
        elif is_block:
            model.layers[name] = wrap(int(number), layer)
    return model


def check_site(config: EncoderDecoderConfig, site: Site) -> None:
    """Raise ConfigError for a site on which the model can't be right."""
    sides = (config.encoder, config.decoder)
    sizes = {config.key("heads"): config.heads, config.key("vocab_size"): config.vocab_size}
    site.check_blocks(sizes | {config.key("encoder.ffn_hidden"): min(side.ffn_hidden for side in sides)})
    if site.num_blocks and config.head_dim == 1:
        raise ConfigError("invariant mode needs heads at least 2 wide: with 1, attention is made of single vectors")


def _chunks(config: EncoderDecoderConfig, site: Site, cutting: Cutting) -> Chosen:
    """This rank's layers, chunk by chunk. Checks the whole model's types."""
    whole = _on(config, site.abstract())
    return chosen_chunks(whole.types(), layer_costs(config, whole.layers), site, cutting)


def _on(config: EncoderDecoderConfig, site: Site, chosen: Chosen = Chosen()) -> EncoderDecoder:  # noqa: B008  (frozen)
    kind = ENCODER_DECODER_TYPES[config.model_type]
    makers = layer_makers(config, site, chosen.has)
    chunks = chosen.made_of(makers, site.batch_type, list(makers)[-1])
    layers = {name: makers[name]() for chunk in chunks for name in chunk.names}
    names = HfNames(kind.hf_pieces(config), kind.ignorable_tensors, tied_params(config))
    model = EncoderDecoder(config, site, layers, names, chunks)
    model.stage_layers = chosen.stages
    return model
