"""SwiGLU: y = gate * s * up with s = 1 / (1 + exp(-gate)); gate_up [t, 2f] holds gate, then up."""

from __future__ import annotations

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.exp import exp
from mpitp.ops.compiled.primitives import row


@compiled()
def swiglu_forward(gate_up: Array, y: Array) -> None:
    """y [t, f] of gate_up [t, 2f]."""
    one = y.dtype.type(1.0)
    for i in range(y.shape[0]):
        both, y_row = row(gate_up, i), row(y, i)
        width = y_row.shape[0]
        gate, up = both[:width], both[width:]
        for j in range(width):
            y_row[j] = gate[j] / (one + exp(-gate[j])) * up[j]


@compiled()
def swiglu_backward(dy: Array, gate_up: Array, dgate_up: Array) -> None:
    """dgate_up [t, 2f] of dy [t, f] and gate_up [t, 2f]."""
    one = dy.dtype.type(1.0)
    for i in range(dy.shape[0]):
        dy_row, both, dboth = row(dy, i), row(gate_up, i), row(dgate_up, i)
        width = dy_row.shape[0]
        gate, up, dgate, dup = both[:width], both[width:], dboth[:width], dboth[width:]
        for j in range(width):
            s = one / (one + exp(-gate[j]))
            silu = gate[j] * s
            dgate[j] = dy_row[j] * up[j] * (s + silu * (one - s))
            dup[j] = dy_row[j] * silu
