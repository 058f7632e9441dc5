"""SwiGLU (Shazeer 2020): y = silu(gate) * up with silu(g) = g * s(g), s the logistic function 1 / (1 + exp(-g)).

    forward     y = gate * s * up
    backward    dup   = dy * gate * s
                dgate = dy * up * s * (1 + gate * (1 - s))

`gate_up` holds the gate columns first, then the up columns, as one matrix product makes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.ops.row_blocks import paired_blocks, without_gaps
from mpitp.ops.wide import by_wide_rows


def swiglu_reference(gate_up: Array) -> Array:
    """The plain forward; it overflows where swiglu_forward is silent."""
    gate, up = split_columns(gate_up)
    return gate / (1.0 + array_module(gate_up).exp(-gate)) * up


@by_wide_rows
def swiglu_forward(gate_up: Array) -> Array:
    """y [t, f] of gate_up [t, 2f]."""
    xp = array_module(gate_up)
    gate, up = split_columns(gate_up)
    y = xp.empty(gate.shape, dtype=gate_up.dtype)
    if is_accelerated(xp, gate_up.dtype):
        from mpitp.ops.compiled import swiglu as compiled

        compiled.swiglu_forward(without_gaps(gate_up), y)
        return y
    for gate_rows, up_rows, y_rows in paired_blocks(xp, gate, up, y):
        _one_plus_exp(xp, gate_rows, out=y_rows)
        xp.divide(gate_rows, y_rows, out=y_rows)
        y_rows *= up_rows
    return y


@by_wide_rows
def swiglu_backward(dy: Array, gate_up: Array) -> Array:
    """dgate_up [t, 2f] of dy [t, f] and gate_up [t, 2f]."""
    xp = array_module(gate_up)
    dgate_up = xp.empty(gate_up.shape, dtype=gate_up.dtype)
    if is_accelerated(xp, gate_up.dtype):
        from mpitp.ops.compiled import swiglu as compiled

        compiled.swiglu_backward(without_gaps(dy), without_gaps(gate_up), dgate_up)
        return dgate_up
    arrays = (*split_columns(gate_up), *split_columns(dgate_up), dy)
    for gate, up, dgate, dup, dy_rows, s, silu in paired_blocks(xp, *arrays, scratch=2):
        _one_plus_exp(xp, gate, out=s)
        xp.divide(1.0, s, out=s)
        xp.multiply(gate, s, out=silu)
        xp.multiply(dy_rows, silu, out=dup)
        # s * (1 + gate * (1 - s)) = s + silu * (1 - s)
        xp.subtract(1.0, s, out=dgate)
        dgate *= silu
        dgate += s
        dgate *= up
        dgate *= dy_rows
    return dgate_up


def split_columns(gate_up: Array) -> tuple[Array, Array]:
    """The gate and the up half, as views."""
    ffn = gate_up.shape[1] // 2
    return gate_up[:, :ffn], gate_up[:, ffn:]


def _one_plus_exp(xp: Any, gate: Array, out: Array) -> None:
    """out = 1 + exp(-gate). For a very negative gate it is inf, and what is divided by it 0, as it should be."""
    xp.negative(gate, out=out)
    with np.errstate(over="ignore"):
        xp.exp(out, out=out)
    out += 1.0
