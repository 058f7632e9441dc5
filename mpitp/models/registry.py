"""Which model types there are, and how a model is put together from one's config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from mpitp.errors import ConfigError, UsageError
from mpitp.layers.build import Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.init import init_params
from mpitp.layers.layer import Layer
from mpitp.layers.partition import Share
from mpitp.layers.recompute import recomputing
from mpitp.layers.rotary import Rotary
from mpitp.layers.scale import Scale, SoftCap
from mpitp.layers.site import Site
from mpitp.models import (
    bloom,
    gemma,
    gemma2,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen2_moe,
    qwen3,
    smollm3,
    stablelm,
)
from mpitp.models.config import DecoderConfig, refuse_slips
from mpitp.models.groupwise import with_scales, without_grouping
from mpitp.models.layered import HfNames, LayeredModel
from mpitp.models.model import EMBEDDING, HEAD, CausalLM
from mpitp.models.names import HfPiece
from mpitp.models.nearest import advice
from mpitp.models.stages import Chosen, Cutting, chosen_chunks, token_costs

ReadConfig = Callable[[Mapping[str, Any]], DecoderConfig]
HfPieces = Callable[[DecoderConfig], dict[tuple[str, str], HfPiece]]
BuildBlock = Callable[[DecoderConfig, Builder, int, Rotary | None], Layer]
AnyModel = TypeVar("AnyModel", bound=LayeredModel)
ENTRY_POINTS = "mpitp.models"  # the group of those that bring model types
TIED = {f"{HEAD}.weight": f"{EMBEDDING}.weight"}


@dataclass(frozen=True, slots=True)
class ModelType:
    """How one Hugging Face model_type is read, built and named. `norm`: makes the last one, of width and eps."""

    read_config: ReadConfig
    build_block: BuildBlock
    norm: Callable[[Builder, int, float], Layer]
    hf_pieces: HfPieces
    ignorable_tensors: tuple[str, ...]


def _like_llama(
    read_config: ReadConfig, hf_pieces: HfPieces = llama.hf_pieces, build_block: BuildBlock = llama.build_block
) -> ModelType:
    return ModelType(read_config, build_block, Builder.rms_norm, hf_pieces, llama.IGNORABLE_TENSORS)


def _like_gemma2(read_config: ReadConfig) -> ModelType:
    return ModelType(
        read_config, gemma2.build_block, Builder.offset_rms_norm, gemma2.hf_pieces, llama.IGNORABLE_TENSORS
    )


MODEL_TYPES: dict[str, ModelType] = {
    "gpt2": ModelType(gpt2.read_config, gpt2.build_block, Builder.layer_norm, gpt2.hf_pieces, gpt2.IGNORABLE_TENSORS),
    "llama": _like_llama(llama.read_config),
    "qwen2": _like_llama(llama.read_qwen2_config),
    "mistral": _like_llama(mistral.read_config),
    "qwen3": _like_llama(qwen3.read_config, qwen3.hf_pieces),
    "smollm3": _like_llama(smollm3.read_config),
    "phi3": _like_llama(phi3.read_config, phi3.hf_pieces),
    "olmo2": _like_llama(olmo2.read_config, olmo2.hf_pieces, olmo2.build_block),
    "mixtral": _like_llama(mixtral.read_config, mixtral.hf_pieces, mixtral.build_block),
    "qwen2_moe": _like_llama(qwen2_moe.read_config, qwen2_moe.hf_pieces, qwen2_moe.build_block),
    "stablelm": ModelType(
        stablelm.read_config, stablelm.build_block, Builder.layer_norm, stablelm.hf_pieces, llama.IGNORABLE_TENSORS
    ),
    "gpt_neox": ModelType(
        gpt_neox.read_config, gpt_neox.build_block, Builder.layer_norm, gpt_neox.hf_pieces, gpt_neox.IGNORABLE_TENSORS
    ),
    "opt": ModelType(opt.read_config, opt.build_block, Builder.layer_norm, opt.hf_pieces, ()),
    "bloom": ModelType(
        bloom.read_config, bloom.build_block, Builder.layer_norm, bloom.hf_pieces, gpt2.IGNORABLE_TENSORS
    ),
    "gemma": ModelType(
        gemma.read_config, gemma.build_block, Builder.offset_rms_norm, llama.hf_pieces, llama.IGNORABLE_TENSORS
    ),
    "gemma2": _like_gemma2(gemma2.read_config),
    "gemma3_text": _like_gemma2(gemma2.read_gemma3_config),
}


def register_model(model_type: str, kind: ModelType) -> None:
    """Make a model type of one's own known to everything that reads a config.json, in this process.

    An installed package does it for all programs by an entry point of the group "mpitp.models" whose name is the
    model_type and whose object is the `ModelType`. Raises UsageError for a type that there is already.
    """
    if MODEL_TYPES.get(model_type, kind) is not kind:
        raise UsageError(f"there is a model type {model_type!r} already; give yours another name")
    MODEL_TYPES[model_type] = kind


def entry_points(**wanted: str) -> Any:
    """Those that installed packages have; the library that finds them is imported by the few who ask."""
    from importlib import metadata

    return metadata.entry_points(**wanted)


def _find_installed(model_type: str) -> None:
    """Register a type that an installed package offers, where one does."""
    for offer in entry_points(group=ENTRY_POINTS, name=model_type):
        try:
            kind = offer.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the entry point {offer.name} = {offer.value} of {ENTRY_POINTS} can't be loaded: {error}"
            ) from error
        if not isinstance(kind, ModelType):
            raise ConfigError(
                f"the entry point {offer.name} = {offer.value} of {ENTRY_POINTS} is no ModelType: {kind!r:.80}"
            )
        register_model(model_type, kind)


def config_from_hf(raw: Mapping[str, Any], own: Collection[str] = ()) -> DecoderConfig:
    """The config of a parsed config.json. Raises ConfigError for a model_type or a key that isn't supported.

    own: keys that the user has written here and now: one of them that nobody reads is a slip, and refused.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type not in MODEL_TYPES:
        _find_installed(model_type)
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        known = list(dict.fromkeys([*MODEL_TYPES, *entry_points(group=ENTRY_POINTS).names]))
        raise ConfigError(
            f"config.json: model_type {model_type!r:.80} is not supported; supported: {', '.join(known)}"
            f"{advice(model_type, known)}"
        )
    floats, grouping = without_grouping(raw)
    config = MODEL_TYPES[model_type].read_config(floats)
    if config.model_type != model_type:
        raise ConfigError(
            f"model type {model_type!r}: its read_config gives a config of {config.model_type!r}, of which that type's "
            f"layers would be made; let it give model_type={model_type!r}"
        )
    if grouping is not None:
        config = replace(config, grouping=grouping, hf=dict(raw))
    refuse_slips(model_type, config.unread, own)
    return config


def build_model(config: DecoderConfig, site: Site, cutting: Cutting = Cutting()) -> CausalLM:  # noqa: B008  (frozen)
    """The model on a site, all parameters zero; of a mesh with stages, this rank's layers. Raises ConfigError for a
    site that can't be, PlacementError where layers don't fit one another, both before anything is allocated.
    """
    check_site(config, site)
    return _put_together(config, site, _chunks(config, site, cutting))


def abstract_model(config: DecoderConfig, site: Site, cutting: Cutting = Cutting()) -> CausalLM:  # noqa: B008  (frozen)
    """The model without memory: to count its parameters, look at its types, or say what it sends."""
    abstract = site.abstract()
    return _put_together(config, abstract, _chunks(config, site, cutting))


def abstract_layers(config: DecoderConfig, site: Site, names: Sequence[str]) -> CausalLM:
    """Some of the model's layers, in forward order, without memory, names in files and a look at their types: to count
    what they hold where that is asked hundreds of times.
    """
    return _put_together(config, site.abstract(), Chosen([(tuple(names), site.batch_type)]), pieces={})


def new_model(config: DecoderConfig, site: Site, *, seed: int, cutting: Cutting = Cutting()) -> CausalLM:  # noqa: B008
    """A model with fresh weights, the same ones at every rank count."""
    if config.grouping is not None:
        raise ConfigError("fresh weights are floats: take quantization_config out of config.json")
    model = build_model(config, site, cutting)
    init_params(model.named_params(), seed)
    return model


def recompute_blocks(model: AnyModel, wish: str) -> AnyModel:
    """The model, its blocks wrapped as a run file wishes: "none", "attention", "full" or "every:N"."""
    wrap = recomputing(wish)
    for name, layer in model.layers.items():
        if name.startswith("blocks."):
            model.layers[name] = wrap(int(name.partition(".")[2]), layer)
    return model


def tensor_names(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in the files, scales of weights in 8 or 4 bits too."""
    pieces = MODEL_TYPES[config.model_type].hf_pieces(config)
    return pieces if config.grouping is None else with_scales(pieces)


def layer_costs(config: DecoderConfig, layers: Mapping[str, Layer]) -> dict[str, float]:
    """Multiplications a token that each layer takes forward (`stages.token_costs`); a lookup takes none."""
    top_k = config.traits.mixture.top_k if config.traits.mixture else 0
    lookups = dict.fromkeys(("embedding", "positions"), float(config.hidden_size))
    return token_costs(layers, lookups, {HEAD: config.vocab_size}, top_k)


def check_site(config: DecoderConfig, site: Site) -> None:
    """Raise ConfigError for a site on which the model can't be right. (Stages: `abstract_model`.)"""
    if config.traits.mixture is not None:
        config.traits.mixture.check(site)
    site.check_blocks({config.key(fact): getattr(config, fact) for fact in ("heads", "ffn_hidden", "vocab_size")})
    if site.num_blocks and config.head_dim == 1:
        raise ConfigError(
            "invariant mode needs a head_dim of at least 2: with 1, attention is made of matrix-vector products, "
            "whose rounding depends on how the heads are dealt"
        )


def _chunks(config: DecoderConfig, site: Site, cutting: Cutting) -> Chosen:
    """This rank's layers, chunk by chunk. Checks the whole model's types."""
    whole = _put_together(config, site.abstract())
    return chosen_chunks(whole.types(), layer_costs(config, whole.layers), site, cutting)


def _put_together(
    config: DecoderConfig,
    site: Site,
    chosen: Chosen = Chosen(),  # noqa: B008  (frozen)
    pieces: dict[tuple[str, str], HfPiece] | None = None,
) -> CausalLM:
    """The chosen layers, chunk by chunk; all of them in one, unless told otherwise. `pieces`: their names in files."""
    kind, build = MODEL_TYPES[config.model_type], Builder(site, config.init_std, config.grouping)
    vocab = site.share(config.vocab_size)
    makers = _makers(config, build, vocab, chosen.has(EMBEDDING))
    chunks = chosen.made_of(makers, site.batch_type, HEAD)
    layers = {name: makers[name]() for chunk in chunks for name in chunk.names}
    names = HfNames(
        tensor_names(config) if pieces is None else pieces, kind.ignorable_tensors, TIED if config.tied else {}
    )
    model = CausalLM(config, site, layers, build.loss(vocab), names, chunks)
    model.stage_layers = chosen.stages
    return model


def _makers(config: DecoderConfig, build: Builder, vocab: Share, has_embedding: bool) -> dict[str, Callable[[], Layer]]:
    """What makes each layer of the model, by name, in forward order.

    `has_embedding`: whether the embedding is made too; where it isn't, a tied head has a replica of its table.
    """
    kind, hidden, traits = MODEL_TYPES[config.model_type], config.hidden_size, config.traits
    width = traits.rotary_width or config.head_dim
    rotary = Rotary(width, config.rope_theta, config.rope_scaling) if config.rope_theta else None
    table = cache(lambda: build.vocab_table(vocab, hidden))
    head_table = (
        table if config.tied and has_embedding else lambda: build.vocab_table(vocab, hidden, is_replica=config.tied)
    )
    makers: dict[str, Callable[[], Layer]] = {EMBEDDING: lambda: build.embedding(table(), vocab)}
    if traits.embedding_scale != 1:
        makers["embedding scale"] = lambda: Scale(traits.embedding_scale)
    if traits.embedding_norm:
        makers["embedding_norm"] = lambda: kind.norm(build, hidden, config.norm_eps)
    if config.has_learned_positions:
        makers["positions"] = lambda: build.positions(config.max_positions, hidden, traits.position_offset)
    if config.dropouts.embedding:
        makers["embedding dropout"] = lambda: Dropout(config.dropouts.embedding, "embedding")
    makers |= {f"blocks.{i}": partial(kind.build_block, config, build, i, rotary) for i in range(config.num_layers)}
    makers["final_norm"] = lambda: kind.norm(build, hidden, config.norm_eps)
    makers[HEAD] = lambda: build.head(head_table(), vocab)
    return makers | ({"logit cap": lambda: SoftCap(traits.logit_cap)} if traits.logit_cap else {})
