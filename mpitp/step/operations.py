r"""What every kind of layer computes, between one collective and the next: its equations, in the letters of the code.

A *segment* is what a rank does by itself; between two segments of a pass lies one collective. W_r, x_r: what rank r
holds of it. The equations are those of the docstrings in `layers/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mpitp.layers.attention import SelfAttention
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.mlp import GeluMLP, SwiGluMLP
from mpitp.layers.norm import LayerNorm, RMSNorm


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a rank's own work. `inputs`: what to show of what it uses; `output`: the name of what it makes.

    `grads`: whether parameters' gradients are among what it makes. `if_bias`: only where the layer has a bias.
    What stands in braces in an equation is only there with a bias.
    """

    equation: str
    inputs: tuple[str, ...]
    output: str = ""
    note: str = ""
    grads: bool = False
    if_bias: bool = False

    def equation_of(self, has_bias: bool) -> str:
        """The equation, with the terms in braces or without them."""
        return re.sub(r"\{(.*?)\}", r"\1" if has_bias else "", self.equation)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of layer. `sums`: what each pass's collectives make, in order: name, then equation and reason.

    `pair` says what the two passes communicate: each is the other's conjugate.
    """

    title: str
    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    sums: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    pair: str = ""


_COLUMN = Kind(
    "column-parallel linear",
    (
        Segment(
            "y_r = x W_r^T{ + b_r}", ("x", "W", "b"), "y", "W is cut along its outputs: a rank makes its columns of y"
        ),
    ),
    (
        Segment("dx_partial = dy_r W_r", ("dy", "W"), "dx_partial", "every rank's columns of y came from the whole x"),
        Segment("dW_r = dy_r^T x{, db_r = sum_t dy_r}", ("dy", "x"), "", "runs while dx is being summed", grads=True),
    ),
    {"backward": (("dx", "dx = sum_r dx_partial: x was used on every rank"),)},
    "CopyToTP: identity forward, all-reduce of dx backward",
)
_ROW = Kind(
    "row-parallel linear",
    (
        Segment("y_partial = x_r W_r^T", ("x", "W"), "y_partial", "W is cut along its inputs: a part of the sum"),
        Segment("y = y + b", ("y", "b"), "y", "the bias is added once, after the sum", if_bias=True),
    ),
    (
        Segment(
            "dx_r = dy W_r, dW_r = dy^T x_r{, db = sum_t dy}",
            ("dy", "W", "x"),
            "dx",
            "dy is the gradient of every rank's y_partial",
            grads=True,
        ),
    ),
    {"forward": (("y", "y = sum_r y_partial"),)},
    "ReduceFromTP: all-reduce of y forward, identity backward",
)  # fmt: skip
_EMBEDDING = Kind(
    "vocabulary-parallel embedding",
    (
        Segment(
            "y_partial[i] = E_r[ids_i] if rank r holds that row, else 0",
            ("x", "W"),
            "y_partial",
            "one rank has each token",
        ),
    ),
    (Segment("dE_r[ids_i] += dy[i] for the rows that rank r holds", ("dy",), "", "dy is on every rank", grads=True),),
    {"forward": (("y", "y = sum_r y_partial: all terms but one are 0"),)},
    "all-reduce of y forward, identity backward",
)
_POSITIONS = Kind(
    "learned positions",
    (Segment("y[i] = P[position_i]", ("x", "W"), "y", "added to the embedding"),),
    (Segment("dP[position_i] += dy[i]", ("dy",), "", grads=True),),
)
_LAYER_NORM = Kind(
    "LayerNorm",
    (Segment("y = (x - mean) / sqrt(var + eps) * W + b, row by row", ("x", "W", "b"), "y", "the same on every rank"),),
    (Segment("dx, dW, db of the row-wise norm", ("dy", "x"), "dx", "the same on every rank", grads=True),),
)
_RMS_NORM = Kind(
    "RMSNorm",
    (Segment("y = x / sqrt(mean(x^2) + eps) * W, row by row", ("x", "W"), "y", "the same on every rank"),),
    (Segment("dx, dW of the row-wise norm", ("dy", "x"), "dx", "the same on every rank", grads=True),),
)
_LOSS = Kind(
    "vocabulary-parallel cross entropy",
    (
        Segment("m_partial = max_j logits_rj", ("x",), "m_partial", "of this rank's columns only"),
        Segment(
            "Z_r = sum_j exp(logits_rj - m), z_r = target's logit or 0", ("x", "m"), "Zz_partial", "two rows: Z and z"
        ),
        Segment("loss = log Z + m - z", ("m", "Zz"), "y", "logits are never gathered"),
    ),
    (
        Segment(
            "dlogits_r = (exp(logits_r - m) / Z - onehot) dloss", ("dy",), "dx", "m, Z and the targets are everywhere"
        ),
    ),
    {"forward": (("m", "m = max_r m_partial"), ("Zz", "Z = sum_r Z_r, z = sum_r z_r"))},
    "two small all-reduces forward, nothing backward",
)
_DROPOUT = Kind(
    "dropout",
    (Segment("y = x keep / (1 - rate)", ("x",), "y", "the mask depends on global indices: equal on every rank"),),
    (Segment("dx = dy keep / (1 - rate)", ("dy",), "dx", "the same mask, drawn again"),),
)

HEADS = Kind(
    "attention of each rank's heads",
    (
        Segment(
            "o_h = softmax(mask(q_h k_g^T / sqrt(d))) v_g",
            ("qkv",),
            "o",
            "head by head (RoPE turns q and k first): no communication",
        ),
    ),
    (
        Segment(
            "dk_g, dv_g of this rank's query heads only", ("do",), "dkv_partial", "this KV head lives on several ranks"
        ),
        Segment("dq_h, dk_g, dv_g of softmax(mask(q k^T / sqrt(d))) v", ("do",), "dqkv", "head by head"),
    ),
    {"backward": (("dkv", "dk_g, dv_g = sum over the ranks whose query heads use KV head g"),)},
    "KV heads on several ranks: copies forward, all-reduce of dk and dv backward",
)
_GELU = Kind(
    "GELU",
    (Segment("a_r = gelu(up_r)", ("up",), "a", "element by element: each rank its own columns"),),
    (Segment("dup_r = da_r gelu'(up_r)", ("da",), "dup", "element by element"),),
)
_SWIGLU = Kind(
    "SwiGLU",
    (Segment("a_r = silu(gate_r) * up_r", ("gate_up",), "a", "element by element: gate and up are cut alike"),),
    (Segment("dgate_r, dup_r of da_r silu(gate_r) * up_r", ("da",), "dgate_up", "element by element"),),
)
RESIDUAL = Kind(
    "residual connection",
    (Segment("y = x + branch", ("x", "branch"), "y", "the same on every rank"),),
    (Segment("dx = dy + dbranch", ("dy", "dbranch"), "dx", "x was used twice: by the branch and past it"),),
)  # fmt: skip

LAYERS: dict[type, Kind] = {
    ColumnParallelLinear: _COLUMN,
    RowParallelLinear: _ROW,
    VocabParallelEmbedding: _EMBEDDING,
    PositionEmbedding: _POSITIONS,
    LayerNorm: _LAYER_NORM,
    RMSNorm: _RMS_NORM,
    VocabParallelCrossEntropy: _LOSS,
    Dropout: _DROPOUT,
}
# What stands between the two linears of these layers.
BETWEEN: dict[type, Kind] = {SelfAttention: HEADS, GeluMLP: _GELU, SwiGluMLP: _SWIGLU}


def kind_of(layer: Any) -> Kind | None:
    """The kind of a layer that computes by itself; None for one that is made of others."""
    return LAYERS.get(type(layer))
