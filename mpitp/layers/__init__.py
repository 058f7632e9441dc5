"""Where parameters meet groups: parallel linears, attention, MLPs, norms, embedding and loss, each split over ranks.

What a layer of one's own is made of lies here: `from mpitp.layers import Layer, Site, make_site, ...`. Names load on
first use, and importing them starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitp.layers.activation import activation_of
    from mpitp.layers.algebra import Algebra, Join, Segment, Sum
    from mpitp.layers.array_type import ArrayType
    from mpitp.layers.attention import AttentionDropout, SelfAttention
    from mpitp.layers.block import TransformerBlock
    from mpitp.layers.build import AttentionSizes, Builder
    from mpitp.layers.convolution import ColumnParallelConvolution, RowParallelConvolution, RowsConvolution
    from mpitp.layers.dropout import Dropout
    from mpitp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
    from mpitp.layers.halo import Halo
    from mpitp.layers.init import init_params
    from mpitp.layers.layer import Layer, Send, TypedLayer, typed_layers, walk
    from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
    from mpitp.layers.loss import VocabParallelCrossEntropy
    from mpitp.layers.mappings import (
        CopyToTP,
        EntryPair,
        ExitPair,
        GatherFromSP,
        ReduceFromTP,
        ReduceScatterToSP,
    )
    from mpitp.layers.mlp import MLP, Gelu, SwiGlu
    from mpitp.layers.norm import LayerNorm, RMSNorm
    from mpitp.layers.parallel_block import ParallelBlock
    from mpitp.layers.param import Param
    from mpitp.layers.partition import Share
    from mpitp.layers.passes import DropoutState, Pass
    from mpitp.layers.placement import Cut, Part, Placement
    from mpitp.layers.product import DenseProduct, Product
    from mpitp.layers.rotary import Rotary
    from mpitp.layers.rows import Rows
    from mpitp.layers.sandwich_block import SandwichBlock
    from mpitp.layers.site import Site, choose_blocks, make_site

_HOMES = {
    "activation": ("activation_of",),
    "algebra": ("Algebra", "Join", "Segment", "Sum"),
    "array_type": ("ArrayType",),
    "attention": ("AttentionDropout", "SelfAttention"),
    "block": ("TransformerBlock",),
    "build": ("AttentionSizes", "Builder"),
    "convolution": ("ColumnParallelConvolution", "RowParallelConvolution", "RowsConvolution"),
    "dropout": ("Dropout",),
    "embedding": ("PositionEmbedding", "VocabParallelEmbedding"),
    "halo": ("Halo",),
    "init": ("init_params",),
    "layer": ("Layer", "Send", "TypedLayer", "typed_layers", "walk"),
    "linear": ("ColumnParallelLinear", "RowParallelLinear"),
    "loss": ("VocabParallelCrossEntropy",),
    "mappings": ("CopyToTP", "EntryPair", "ExitPair", "GatherFromSP", "ReduceFromTP", "ReduceScatterToSP"),
    "mlp": ("MLP", "Gelu", "SwiGlu"),
    "norm": ("LayerNorm", "RMSNorm"),
    "parallel_block": ("ParallelBlock",),
    "param": ("Param",),
    "partition": ("Share",),
    "passes": ("DropoutState", "Pass"),
    "placement": ("Cut", "Part", "Placement"),
    "product": ("DenseProduct", "Product"),
    "rotary": ("Rotary",),
    "rows": ("Rows",),
    "sandwich_block": ("SandwichBlock",),
    "site": ("Site", "choose_blocks", "make_site"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Algebra",
    "ArrayType",
    "AttentionDropout",
    "AttentionSizes",
    "Builder",
    "ColumnParallelConvolution",
    "ColumnParallelLinear",
    "CopyToTP",
    "Cut",
    "DenseProduct",
    "Dropout",
    "DropoutState",
    "EntryPair",
    "ExitPair",
    "GatherFromSP",
    "Gelu",
    "Halo",
    "Join",
    "Layer",
    "LayerNorm",
    "MLP",
    "ParallelBlock",
    "Param",
    "Part",
    "Pass",
    "Placement",
    "PositionEmbedding",
    "Product",
    "RMSNorm",
    "ReduceFromTP",
    "ReduceScatterToSP",
    "Rotary",
    "RowParallelConvolution",
    "RowParallelLinear",
    "Rows",
    "RowsConvolution",
    "SandwichBlock",
    "Segment",
    "SelfAttention",
    "Send",
    "Share",
    "Site",
    "Sum",
    "SwiGlu",
    "TransformerBlock",
    "TypedLayer",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "activation_of",
    "choose_blocks",
    "init_params",
    "make_site",
    "typed_layers",
    "walk",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
