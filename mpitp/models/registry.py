"""Which model types there are, and how a model is put together from one's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.device import CpuDevice, Device
from mpitp.comm.group import Group
from mpitp.errors import ConfigError
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder, sharded
from mpitp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from mpitp.layers.init import init_params
from mpitp.layers.layout import Layout
from mpitp.layers.linear import ColumnParallelLinear
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.mappings import CopyToTP
from mpitp.models import gpt2, llama
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM, ModelParts
from mpitp.models.names import HfPiece


@dataclass(frozen=True, slots=True)
class ModelType:
    """How one Hugging Face model_type is read, built and named."""

    read_config: Callable[[Mapping[str, Any]], DecoderConfig]
    build_block: Callable[[DecoderConfig, Builder, int], TransformerBlock]
    hf_pieces: Callable[[DecoderConfig], dict[tuple[str, str], HfPiece]]
    ignorable_tensors: tuple[str, ...]


MODEL_TYPES: dict[str, ModelType] = {
    "gpt2": ModelType(gpt2.read_config, gpt2.build_block, gpt2.hf_pieces, gpt2.IGNORABLE_TENSORS),
    "llama": ModelType(llama.read_config, llama.build_block, llama.hf_pieces, llama.IGNORABLE_TENSORS),
    "qwen2": ModelType(llama.read_qwen2_config, llama.build_block, llama.hf_pieces, llama.IGNORABLE_TENSORS),
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a parsed config.json. Raises ConfigError for a model_type or a key that isn't supported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
        )
    return MODEL_TYPES[model_type].read_config(raw)


def build_model(
    config: DecoderConfig,
    group: Group,
    *,
    dtype: str = "float32",
    device: Device | None = None,
    invariant_blocks: int = 0,
) -> CausalLM:
    """The model laid over `group`, all parameters zero.

    `invariant_blocks` > 0 cuts every dimension into that many blocks, for results that are equal to the last bit at any
    rank count up to it.
    """
    device, layout = device or CpuDevice(), Layout(group, invariant_blocks)
    layout.check({config.key(fact): getattr(config, fact) for fact in ("heads", "ffn_hidden", "vocab_size")})
    if invariant_blocks and config.head_dim == 1:
        raise ConfigError(
            "invariant mode needs a head_dim of at least 2: with 1, attention is made of matrix-vector products, "
            "whose rounding depends on how the heads are dealt"
        )
    build = Builder(layout, device, dtype, config.init_std)
    return CausalLM(config, layout, device, dtype, _parts(config, build))


def new_model(
    config: DecoderConfig,
    group: Group,
    *,
    seed: int,
    dtype: str = "float32",
    device: Device | None = None,
    invariant_blocks: int = 0,
) -> CausalLM:
    """A model with fresh weights, the same ones at every rank count."""
    model = build_model(config, group, dtype=dtype, device=device, invariant_blocks=invariant_blocks)
    init_params(model.named_params(), seed)
    return model


def _parts(config: DecoderConfig, build: Builder) -> ModelParts:
    kind, layout = MODEL_TYPES[config.model_type], build.layout
    vocab = layout.share(config.vocab_size)
    table = build.matrix([sharded("vocab", vocab)], config.hidden_size, dim=0)
    head_weight = table if config.tied else build.matrix([sharded("vocab", vocab)], config.hidden_size, dim=0)
    learned = not config.rope_theta
    positions = build.replicated_matrix(config.max_positions, config.hidden_size) if learned else None
    norm = build.layer_norm if config.model_type == "gpt2" else build.rms_norm
    return ModelParts(
        embedding=VocabParallelEmbedding(table, vocab, layout.group),
        positions=PositionEmbedding(positions) if positions is not None else None,
        blocks=[kind.build_block(config, build, i) for i in range(config.num_layers)],
        final_norm=norm(config.hidden_size, config.norm_eps),
        head=ColumnParallelLinear(head_weight, None, CopyToTP(layout.summation), vocab.local_blocks),
        loss=VocabParallelCrossEntropy(vocab, layout.group, layout.summation),
        pieces=kind.hf_pieces(config),
        ignorable_tensors=kind.ignorable_tensors,
    )
