"""AdamW (Loshchilov and Hutter 2019) in place, in the order of operations of torch.optim.AdamW.

    param -= lr * weight_decay * param
    m += (1 - beta1) * (grad - m)
    v  = beta2 * v + (1 - beta2) * grad^2
    param -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitp.backend.arrays import array_module
from mpitp.ops.row_blocks import block_rows, row_blocks

Array = Any


def adamw_update(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Update param, m and v in place; all four are contiguous and of one shape. `step` counts from 1."""
    xp = array_module(param)
    param, grad, m, v = (_flat(x) for x in (param, grad, m, v))
    decay, step_size = 1.0 - lr * weight_decay, lr / (1.0 - beta1**step)
    root = math.sqrt(1.0 - beta2**step)
    for block in row_blocks(xp, param.shape[0], param.dtype.itemsize):
        p, g, m_, v_ = param[block], grad[block] * grad_scale, m[block], v[block]
        p *= decay
        m_ += (g - m_) * (1.0 - beta1)
        v_ *= beta2
        v_ += g * g * (1.0 - beta2)
        p -= m_ / (xp.sqrt(v_) / root + eps) * step_size


def sum_of_squares(x: Array) -> Array:
    """Sum of x^2 in float64 (a scalar of x's device), in a fixed order that depends on the number of elements alone."""
    xp = array_module(x)
    flat = xp.ascontiguousarray(x).reshape(-1)
    total = xp.zeros((), dtype=np.float64)
    for block in row_blocks(xp, flat.shape[0], np.dtype(np.float64).itemsize):
        wide = flat[block].astype(np.float64)
        total = total + (wide * wide).sum()
    return total


def _flat(x: Array) -> Array:
    assert x.flags.c_contiguous, "AdamW works on flat views"
    return x.reshape(-1)
