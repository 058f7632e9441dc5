r"""Activations between an MLP's two linears, as layers: any function of `ops/elementwise.py`, alone or as a gate.

The tanh GELU alone and the gated SiLU have layers of their own (`mlp.py`) over faster ops; `activation_of` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.errors import ConfigError
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import ActivationContext, Gelu, SwiGlu
from mpitp.ops.elementwise import (
    FUNCTIONS,
    Elementwise,
    activation_backward,
    activation_forward,
    gated_backward,
    gated_forward,
)


class Activation(Layer):
    """y = f(x), element by element."""

    algebra = Algebra(
        "activation",
        (Segment("a_r = f(up_r)", "up", "a", "element by element: each rank its own columns"),),
        (Segment("dup_r = da_r f'(up_r)", "da", "dup", "element by element"),),
        names={"x": "up", "y": "a", "dy": "da", "dx": "dup"},
    )

    def __init__(self, function: Elementwise) -> None:
        self.function = function

    def forward(self, x: Array, run: Any = None) -> tuple[Array, ActivationContext]:
        """x [t, f/tp] -> y [t, f/tp]."""
        return activation_forward(self.function, x), ActivationContext(x)

    def backward(self, dy: Array, ctx: ActivationContext) -> Array:
        """dy [t, f/tp] -> dx [t, f/tp]."""
        return activation_backward(self.function, dy, ctx.x)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Each element by itself: whatever isn't a summand stays what it is."""
        incoming.expect_summed("what goes through an activation")
        return incoming


class GatedActivation(Layer):
    """y = f(gate) * up, of x = [gate | up] (Shazeer 2020)."""

    algebra = Algebra(
        "gated activation",
        (Segment("a_r = f(gate_r) * up_r", "gate_up", "a", "element by element: gate and up are cut alike"),),
        (Segment("dgate_r, dup_r of da_r f(gate_r) * up_r", "da", "dgate_up", "element by element"),),
        names={"x": "gate_up", "y": "a", "dy": "da", "dx": "dgate_up"},
    )

    def __init__(self, function: Elementwise) -> None:
        self.function = function

    def forward(self, x: Array, run: Any = None) -> tuple[Array, ActivationContext]:
        """x [t, 2f/tp] -> y [t, f/tp]."""
        return gated_forward(self.function, x), ActivationContext(x)

    def backward(self, dy: Array, ctx: ActivationContext) -> Array:
        """dy [t, f/tp] -> dx [t, 2f/tp]."""
        return gated_backward(self.function, dy, ctx.x)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Gate and up must be cut alike."""
        return incoming.joined(2, "gate and up")


def activation_of(name: str, *, gated: bool) -> Layer:
    """The layer of a function: "gelu" (by erf), "gelu_tanh", "quick_gelu", "silu" or "relu"."""
    if name not in FUNCTIONS:
        raise ConfigError(f"activation {name!r} is not supported; expected one of {', '.join(FUNCTIONS)}")
    if gated:
        return SwiGlu() if name == "silu" else GatedActivation(FUNCTIONS[name])
    return Gelu() if name == "gelu_tanh" else Activation(FUNCTIONS[name])
