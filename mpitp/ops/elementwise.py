r"""Activations of MLPs, element by element, each a value and a slope; alone or as the gate of another array.

    alone   y = f(x)               dx = dy f'(x)
    gated   y = f(gate) up         dgate = dy up f'(gate),  dup = dy f(gate)         (GLU variants, Shazeer 2020)

    gelu        x Phi(x)                    Phi: the normal distribution (Hendrycks & Gimpel 2016); by erf
    gelu_tanh   its approximation by tanh   (`gelu.py`)
    quick_gelu  x s(1.702 x)                s(z) = 1 / (1 + exp(-z))
    silu        x s(x)
    relu        max(x, 0)
    tanh        tanh(x)                     (a pooler)

The tanh GELU alone and the gated SiLU, which most models have, are ops of their own (`gelu.py`, `swiglu.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import is_half
from mpitp.ops.erf import erf, highest_first
from mpitp.ops.gelu import gelu_backward_reference, gelu_reference
from mpitp.ops.row_blocks import paired_blocks, without_gaps
from mpitp.ops.swiglu import split_columns
from mpitp.ops.wide import by_wide_rows


class Elementwise(ABC):
    """A function of one number and its derivative."""

    @abstractmethod
    def value(self, x: Array) -> Array:
        """f(x), a new array."""

    @abstractmethod
    def slope(self, x: Array) -> Array:
        """f'(x), a new array."""


class Gelu(Elementwise):
    """x Phi(x) with Phi(x) = (1 + erf(x / sqrt 2)) / 2; its slope is Phi(x) + x phi(x), phi(x) = Phi'(x)."""

    def value(self, x: Array) -> Array:
        y = erf(x * math.sqrt(0.5))
        y += 1.0
        y *= x
        y *= 0.5
        return y

    def slope(self, x: Array) -> Array:
        density = array_module(x).exp(x * x * -0.5)
        density *= x
        density *= 1.0 / math.sqrt(2.0 * math.pi)
        slope = erf(x * math.sqrt(0.5))
        slope += 1.0
        slope *= 0.5
        slope += density
        return slope


class TanhGelu(Elementwise):
    """x/2 (1 + tanh(x (A + B x^2))), as `gelu.py` has it."""

    def value(self, x: Array) -> Array:
        return gelu_reference(x)

    def slope(self, x: Array) -> Array:
        return gelu_backward_reference(array_module(x).ones_like(x), x)


@dataclass(frozen=True, slots=True)
class SigmoidLinear(Elementwise):
    """x s(c x): SiLU with c = 1 (Elfwing et al. 2017), the quick GELU with c = 1.702. Slope s + c x s (1 - s)."""

    c: float

    def value(self, x: Array) -> Array:
        return x * _logistic(x * self.c)

    def slope(self, x: Array) -> Array:
        s = _logistic(x * self.c)
        return s + self.c * x * s * (1.0 - s)


class Relu(Elementwise):
    """max(x, 0); its slope at 0 is 0."""

    def value(self, x: Array) -> Array:
        return array_module(x).maximum(x, 0.0)

    def slope(self, x: Array) -> Array:
        return (x > 0).astype(x.dtype)


class Tanh(Elementwise):
    """tanh(x)."""

    def value(self, x: Array) -> Array:
        return array_module(x).tanh(x)

    def slope(self, x: Array) -> Array:
        t = array_module(x).tanh(x)
        t *= t
        return 1.0 - t


FUNCTIONS: dict[str, Elementwise] = {
    "gelu": Gelu(),
    "gelu_tanh": TanhGelu(),
    "quick_gelu": SigmoidLinear(1.702),
    "silu": SigmoidLinear(1.0),
    "relu": Relu(),
    "tanh": Tanh(),
}


KERNELS = {  # functions that have a compiled kernel: its kind, and c (`compiled/elementwise.py`)
    FUNCTIONS["gelu"]: (0, 0.0),
    FUNCTIONS["gelu_tanh"]: (1, 0.0),
    FUNCTIONS["quick_gelu"]: (2, 1.702),
    FUNCTIONS["silu"]: (2, 1.0),
}


def activation_forward(function: Elementwise, x: Array) -> Array:
    """y = f(x); both [t, f]."""
    if is_half(x.dtype):
        return by_wide_rows(partial(activation_forward, function))(x)
    xp = array_module(x)
    y = xp.empty(x.shape, dtype=x.dtype)
    for x_rows, y_rows in paired_blocks(xp, x, y):
        _put_values(function, x_rows, y_rows)
    return y


def activation_backward(function: Elementwise, dy: Array, x: Array) -> Array:
    """dx of dy and the forward's x; all [t, f]."""
    if is_half(x.dtype):
        return by_wide_rows(partial(activation_backward, function))(dy, x)
    xp = array_module(x)
    dx = xp.empty(x.shape, dtype=x.dtype)
    if is_accelerated(xp, x.dtype) and function in KERNELS:
        from mpitp.ops.compiled import elementwise as compiled

        compiled.backward(*KERNELS[function], highest_first(x.dtype), without_gaps(dy), without_gaps(x), dx)
        return dx
    for dy_rows, x_rows, dx_rows in paired_blocks(xp, dy, x, dx):
        xp.multiply(dy_rows, function.slope(x_rows), out=dx_rows)
    return dx


def gated_forward(function: Elementwise, gate_up: Array) -> Array:
    """y [t, f] of gate_up [t, 2f]: the gate columns first, then the up columns."""
    if is_half(gate_up.dtype):
        return by_wide_rows(partial(gated_forward, function))(gate_up)
    xp = array_module(gate_up)
    gate, up = split_columns(gate_up)
    y = xp.empty(gate.shape, dtype=gate_up.dtype)
    for gate_rows, up_rows, y_rows in paired_blocks(xp, gate, up, y):
        _put_values(function, gate_rows, y_rows)
        y_rows *= up_rows
    return y


def gated_backward(function: Elementwise, dy: Array, gate_up: Array) -> Array:
    """dgate_up [t, 2f] of dy [t, f] and gate_up [t, 2f]."""
    if is_half(gate_up.dtype):
        return by_wide_rows(partial(gated_backward, function))(dy, gate_up)
    xp = array_module(gate_up)
    dgate_up = xp.empty(gate_up.shape, dtype=gate_up.dtype)
    if is_accelerated(xp, gate_up.dtype) and function in KERNELS:
        from mpitp.ops.compiled import elementwise as compiled

        rows = without_gaps(dy), without_gaps(gate_up)
        compiled.gated_backward(*KERNELS[function], highest_first(dy.dtype), *rows, dgate_up)
        return dgate_up
    arrays = (*split_columns(gate_up), *split_columns(dgate_up), dy)
    for gate, up, dgate, dup, dy_rows in paired_blocks(xp, *arrays):
        xp.multiply(dy_rows, function.value(gate), out=dup)
        xp.multiply(dy_rows, up, out=dgate)
        dgate *= function.slope(gate)
    return dgate_up


def _put_values(function: Elementwise, x: Array, y: Array) -> None:
    """f(x) into y."""
    if is_accelerated(array_module(x), x.dtype) and function in KERNELS:
        from mpitp.ops.compiled import elementwise as compiled

        compiled.values(*KERNELS[function], highest_first(x.dtype), without_gaps(x), y)
    else:
        y[...] = function.value(x)


def _logistic(z: Any) -> Any:
    """1 / (1 + exp(-z)); where exp overflows it is 0, as it should be."""
    with np.errstate(over="ignore"):
        e = array_module(z).exp(-z)
    e += 1.0
    return 1.0 / e
