"""The kinds of models whose layouts are planned, in what their anatomy needs: layers without memory, what is dealt.

Decoders, and encoders with a decoder; of the latter source and target have as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from mpitp.errors import ConfigError
from mpitp.layers.crossing import OnSource
from mpitp.layers.layer import Layer
from mpitp.layers.partition import share_heads, share_of
from mpitp.layers.site import Site
from mpitp.models.config import DecoderConfig
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.encoder_decoders import abstract_encoder_decoder, abstract_pair_layers
from mpitp.models.layered import LayeredModel
from mpitp.models.registry import abstract_layers, abstract_model
from mpitp.models.stages import Units

PlannedConfig = DecoderConfig | EncoderDecoderConfig
PLANNED_TASKS = ("text", "translation")  # of a run file's task.kind


def refuse_cut_sources(config: object, cp: int) -> None:
    """Raise ConfigError for a model with an encoder and a decoder whose sequences are cut: no formula here knows the
    keys and values of sources that are gathered along cp.
    """
    if isinstance(config, EncoderDecoderConfig) and cp > 1:
        raise ConfigError(
            f"plan doesn't know what mesh.cp={cp} sends for the sources of a model with an encoder and a decoder; "
            "`plan memory` and `train` do. Leave mesh.cp out here"
        )


def whole_model(config: PlannedConfig, site: Site) -> LayeredModel:
    """All layers."""
    if isinstance(config, EncoderDecoderConfig):
        return abstract_encoder_decoder(config, site)
    return abstract_model(config, site)


def some_layers(config: PlannedConfig, site: Site, names: Sequence[str]) -> LayeredModel:
    """The layers of these names."""
    if isinstance(config, EncoderDecoderConfig):
        return abstract_pair_layers(config, site, names)
    return abstract_layers(config, site, names)


def is_block(name: str) -> bool:
    """Whether a layer of the model is one of its blocks."""
    return name.removeprefix("encoder.").startswith("blocks.")


def with_recompute(block: Layer, wrap: Callable[[int, Layer], Layer]) -> Layer:
    """A block as it is wrapped for recomputing; one of an encoder inside of what gives it the source's rows."""
    if not isinstance(block, OnSource):
        return wrap(0, block)
    block.inner = wrap(0, block.inner)
    return block


def dealt_units(config: PlannedConfig, rank: int, tp: int) -> tuple[int, ...]:
    """How much of everything that is dealt along tp a rank has: ranks for which this is equal do the same."""
    if isinstance(config, EncoderDecoderConfig):
        sides = (config.encoder, config.decoder)
        units: Iterable[int] = (config.vocab_size, *(n for side in sides for n in (side.heads, side.ffn_hidden)))
        return tuple(share_of(count, rank, tp).size for count in units)
    heads = share_heads(config.heads, config.kv_heads, rank, tp)
    mixture = config.traits.mixture
    widths = (config.ffn_hidden, config.vocab_size, *((mixture.width, mixture.shared) if mixture else ()))
    others = (share_of(width, rank, tp).size for width in widths)
    return heads.query.size, len(heads.kv), len(heads.kv_shared), *others


def unit_starts(names: Sequence[str]) -> list[int]:
    """Places among all layers where each block that stages are dealt begins, and where the last one ends. What stands
    where an encoder ends and a decoder begins goes with the blocks there.
    """
    units = Units.of(names)
    return list(accumulate(map(len, units.blocks), initial=len(units.before)))


def tied_places(model: LayeredModel) -> dict[str, list[int]]:
    """Of each parameter that several layers share, by its first name, the places of these layers."""
    names = list(model.layers)
    places: dict[str, list[int]] = {}
    for second, first in model.tied.items():
        for name in (first, second):
            own = next(i for i, layer in enumerate(names) if name.startswith(f"{layer}."))
            places.setdefault(first, [])
            if own not in places[first]:
                places[first].append(own)
    return {first: sorted(own) for first, own in places.items()}
