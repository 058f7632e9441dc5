"""Products that round what they are given too: those of weights in 8 or 4 bits, by whole numbers (`ops/rounded.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpitp.layers.expert_matrices import GroupwiseMatrices
from mpitp.layers.experts import Experts
from mpitp.layers.groupwise import GroupwiseProduct
from mpitp.layers.layer import Layer
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.ops.rounded import rounded_forward


def round_inputs(layers: Iterable[object]) -> None:
    """From now on, of all linears and experts among these layers and inside them. Others stay as they are."""
    for layer in layers:
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            if isinstance(layer.product, GroupwiseProduct):
                layer.product = replace(layer.product, multiply=rounded_forward)
        elif isinstance(layer, Experts):
            for name in ("gate_up", "down"):
                matrices = getattr(layer, name)
                if isinstance(matrices, GroupwiseMatrices):
                    setattr(layer, name, replace(matrices, multiply=rounded_forward))
        elif isinstance(layer, Layer):
            round_inputs(layer.children().values())
