"""Blocks that several types share, put together from a config's facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitp.layers.attention import AttentionDropout, SelfAttention
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import AttentionSizes, Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.head_norm import HeadNorms
from mpitp.layers.joint_norm import JointNorms
from mpitp.layers.mlp import MLP
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.parallel_block import ParallelBlock
from mpitp.layers.partition import HeadShare
from mpitp.layers.rotary import Rotary
from mpitp.models.config import DecoderConfig
from mpitp.ops.score_change import Alibi, ScoreCap, ScoreChange, alibi_slopes
from mpitp.ops.sight import CAUSAL, EVERYTHING, Band

if TYPE_CHECKING:
    from mpitp.layers.mixture import MixtureOfExperts
    from mpitp.models.encoder_config import EncoderConfig
    from mpitp.models.vision_config import VisionConfig

MakeNorm = Callable[[Builder, int, float], LayerNorm | RMSNorm]


def attention_of(
    config: DecoderConfig,
    build: Builder,
    index: int,
    rotary: Rotary | None,
    *,
    norm_offset: float = 0.0,
    out_std: float | None = None,
) -> SelfAttention:
    """The attention of block `index`. norm_offset: of the norms of q and k, where there are such."""
    traits, own = config.traits, build.site.heads(config.heads, config.kv_heads)
    sizes = AttentionSizes(
        own,
        config.head_dim,
        config.hidden_size,
        config.qkv_bias,
        config.out_bias,
        out_std,
        sight=Band(behind=traits.window(index) - 1) if traits.window(index) else CAUSAL,
        scale=traits.score_scale(index),
        change=_score_change(config, own),
    )
    norms = _norms_of(config, build, own, norm_offset)
    turned = None if index in traits.unrotated else rotary
    return build.attention(
        sizes, AttentionDropout(config.dropouts.attention, f"blocks.{index}.attention"), turned, norms
    )


def encoder_branches(
    config: EncoderConfig | VisionConfig, build: Builder, name: str, *, qkv_bias: bool = True
) -> tuple[SelfAttention, MLP]:
    """Attention and MLP of the block called `name`, in which every token sees every other one of its own sample."""
    site, hidden = build.site, config.hidden_size
    own, share = site.heads(config.heads, config.heads), site.share(config.ffn_hidden)
    sizes = AttentionSizes(own, config.head_dim, hidden, qkv_bias, True, sight=EVERYTHING)
    attention = build.attention(sizes, AttentionDropout(config.dropouts.attention, f"{name}.attention"))
    return attention, build.mlp(hidden, share, gated=False, bias=True, activation=config.activation)


def _norms_of(config: DecoderConfig, build: Builder, own: HeadShare, offset: float) -> HeadNorms | JointNorms | None:
    """The norms of q and k."""
    if config.traits.joint_norms:
        return build.joint_norms(own, config.head_dim, config.norm_eps)
    return build.head_norms(own, config.head_dim, config.norm_eps, offset) if config.traits.head_norms else None


def _score_change(config: DecoderConfig, own: HeadShare) -> ScoreChange | None:
    """What becomes of scores beyond their scale."""
    if config.traits.alibi:
        return Alibi(alibi_slopes(config.heads)[own.query.span.start : own.query.span.stop])
    return ScoreCap(config.traits.score_cap) if config.traits.score_cap else None


def mlp_of(config: DecoderConfig, build: Builder, *, gated: bool, out_std: float | None = None) -> MLP:
    """The MLP of a block, with the type's activation."""
    share = build.columns(config.ffn_hidden)
    name = config.traits.activation or None
    return build.mlp(config.hidden_size, share, gated=gated, bias=config.mlp_bias, out_std=out_std, activation=name)


def dropouts_of(config: DecoderConfig | EncoderConfig | VisionConfig, index: int) -> tuple[Dropout, Dropout]:
    """Those of the two residual branches."""
    rate = config.dropouts.residual
    return Dropout(rate, f"blocks.{index}.residual1"), Dropout(rate, f"blocks.{index}.residual2")


def pre_norm_block(
    config: DecoderConfig,
    build: Builder,
    attention: SelfAttention,
    mlp: MLP | MixtureOfExperts,
    norm: MakeNorm,
    index: int,
) -> TransformerBlock:
    """A norm before each branch, one branch after the other."""
    norms = [norm(build, config.hidden_size, config.norm_eps) for _ in range(2)]
    return TransformerBlock(norms[0], attention, norms[1], mlp, dropouts_of(config, index))


def parallel_block(
    config: DecoderConfig,
    build: Builder,
    branches: tuple[SelfAttention, MLP],
    dropouts: tuple[Dropout, Dropout],
    *,
    one_norm: bool,
) -> ParallelBlock:
    """Both branches beside one another, behind a LayerNorm each or behind one."""
    norms = [build.layer_norm(config.hidden_size, config.norm_eps) for _ in range(1 if one_norm else 2)]
    return ParallelBlock(norms[0], branches[0], None if one_norm else norms[1], branches[1], dropouts)
