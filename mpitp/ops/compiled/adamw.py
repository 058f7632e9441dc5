"""The optimizer's update and the sum of squares over flat arrays, each in one pass."""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import ROW_SUM, compiled
from mpitp.backend.arrays import Array


@compiled()
def adamw_update(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    grad_scale: float,
    decay: float,
    beta1: float,
    beta2: float,
    step_size: float,
    root: float,
    eps: float,
) -> None:
    """param, m and v [n] after one step with grad [n] * grad_scale; the numbers are those of `mpitp.ops.adamw`."""
    kind = param.dtype.type
    scale, keep, add_m, add_v = kind(grad_scale), kind(decay), kind(1.0 - beta1), kind(1.0 - beta2)
    keep_v, size, divisor, epsilon = kind(beta2), kind(step_size), kind(root), kind(eps)
    for j in range(param.shape[0]):
        g = grad[j] * scale
        first = m[j] + (g - m[j]) * add_m
        second = v[j] * keep_v + g * g * add_v
        m[j], v[j] = first, second
        param[j] = param[j] * keep - first / (np.sqrt(second) / divisor + epsilon) * size


@compiled(ROW_SUM)
def sum_of_squares(x: Array) -> float:
    """Sum of x^2 over x [n], in float64."""
    total = 0.0
    for j in range(x.shape[0]):
        total += np.float64(x[j]) * np.float64(x[j])
    return total
