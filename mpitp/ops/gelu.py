"""GELU in the tanh form of GPT-2 (Hendrycks and Gimpel 2016; `gelu_new`, `gelu_pytorch_tanh`).

    y = x/2 * (1 + tanh(u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)

Since (1 + tanh(u)) / 2 = s(2u) with the logistic function s, the same is

    forward     y  = x * s(z),  z = 2u = x * (A + B x^2)
    backward    dx = dy * (s + x * s * (1 - s) * (A + 3 B x^2))

which needs one exp, and keeps full relative accuracy for large negative x, where 1 + tanh(u) cancels.
"""

from __future__ import annotations

import math
from typing import Any

from mpitp.backend.arrays import array_module

Array = Any

A = 2.0 * math.sqrt(2.0 / math.pi)
B = 0.044715 * A


def gelu_reference(x: Array) -> Array:
    """The plain forward, as the paper writes it."""
    xp = array_module(x)
    return 0.5 * x * (1.0 + xp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_forward(x: Array) -> Array:
    """y = gelu(x), elementwise; any shape."""
    return gelu_reference(x)


def gelu_backward(dy: Array, x: Array) -> Array:
    """dx of dy and the forward's x, elementwise."""
    xp = array_module(x)
    s = 0.5 * (1.0 + xp.tanh(0.5 * x * (A + B * x * x)))
    return dy * (s + x * s * (1.0 - s) * (A + 3.0 * B * x * x))
