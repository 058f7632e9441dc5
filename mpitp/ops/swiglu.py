"""SwiGLU (Shazeer 2020): y = silu(gate) * up with silu(g) = g * s(g), s the logistic function.

    forward     y = gate * s * up
    backward    dup   = dy * gate * s
                dgate = dy * up * s * (1 + gate * (1 - s))

`gate_up` holds the gate columns first, then the up columns, as one matrix product makes them.
"""

from __future__ import annotations

from typing import Any

from mpitp.backend.arrays import array_module

Array = Any

EXP_LIMIT = 87.0  # exp(87) is finite in float32; s(-87) = 1.6e-38 is 0 for every purpose


def swiglu_reference(gate_up: Array) -> Array:
    """The plain forward over the whole array."""
    gate, up = split_columns(gate_up)
    return gate * logistic(gate) * up


def swiglu_forward(gate_up: Array) -> Array:
    """y [t, f] of gate_up [t, 2f]."""
    return swiglu_reference(gate_up)


def swiglu_backward(dy: Array, gate_up: Array) -> Array:
    """dgate_up [t, 2f] of dy [t, f] and gate_up [t, 2f]."""
    xp = array_module(gate_up)
    gate, up = split_columns(gate_up)
    s = logistic(gate)
    dgate_up = xp.empty(gate_up.shape, dtype=gate_up.dtype)
    dgate, dup = split_columns(dgate_up)
    dgate[...] = dy * up * s * (1.0 + gate * (1.0 - s))
    dup[...] = dy * gate * s
    return dgate_up


def split_columns(gate_up: Array) -> tuple[Array, Array]:
    """The gate and the up half, as views."""
    ffn = gate_up.shape[1] // 2
    return gate_up[:, :ffn], gate_up[:, ffn:]


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    xp = array_module(x)
    return 1.0 / (1.0 + xp.exp(xp.minimum(-x, EXP_LIMIT)))
