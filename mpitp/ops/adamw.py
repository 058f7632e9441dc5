"""AdamW (Loshchilov and Hutter 2019) in place, in the order of operations of torch.optim.AdamW.

param -= lr * weight_decay * param
m += (1 - beta1) * (grad - m)
v  = beta2 * v + (1 - beta2) * grad^2
param -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.ops.row_blocks import paired_blocks


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """The numbers of one update; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def bias_corrections(self) -> tuple[float, float]:
        """What m is multiplied by, and the root of v divided by."""
        return _bias_corrections(self.lr, self.beta1, self.beta2, self.step)


def adamw_reference(param: Array, grad: Array, m: Array, v: Array, rule: AdamWRule) -> tuple[Array, Array, Array]:
    """The plain update: new param, m and v."""
    m = m + (1.0 - rule.beta1) * (grad - m)
    v = rule.beta2 * v + (1.0 - rule.beta2) * grad**2
    step_size, root = rule.bias_corrections()
    param = param * (1.0 - rule.lr * rule.weight_decay)
    return param - step_size * (m / (array_module(param).sqrt(v) / root + rule.eps)), m, v


def adamw_update(param: Array, grad: Array, m: Array, v: Array, rule: AdamWRule, grad_scale: float = 1.0) -> None:
    """Update param, m and v in place; all four are contiguous and of one shape.

    The gradient is used as grad * grad_scale (clipping), and left as it is.
    """
    xp = array_module(param)
    step_size, root = rule.bias_corrections()
    beta1, beta2, eps, decay = rule.beta1, rule.beta2, rule.eps, float(1.0 - rule.lr * rule.weight_decay)
    arrays = [_flat(x) for x in (param, grad, m, v)]
    if is_accelerated(xp, param.dtype):
        from mpitp.ops.compiled import adamw as compiled

        compiled.adamw_update(*arrays, float(grad_scale), decay, beta1, beta2, step_size, root, eps)
        return
    for param_, grad_, m_, v_, g, work in paired_blocks(xp, *arrays, scratch=2):
        xp.multiply(grad_, float(grad_scale), out=g)
        xp.subtract(g, m_, out=work)
        work *= float(1.0 - beta1)
        m_ += work
        g *= g
        g *= float(1.0 - beta2)
        v_ *= float(beta2)
        v_ += g
        xp.sqrt(v_, out=g)
        g /= root
        g += float(eps)
        xp.divide(m_, g, out=g)
        g *= step_size
        param_ *= decay
        param_ -= g


def sum_of_squares(x: Array) -> Array:
    """Sum of x^2 as a float64 scalar on x's device, added in an order that depends on the number of elements alone."""
    xp = array_module(x)
    if is_accelerated(xp, x.dtype):
        from mpitp.ops.compiled import adamw as compiled

        return np.float64(compiled.sum_of_squares(xp.ascontiguousarray(x).reshape(-1)))
    total = xp.zeros((), dtype=np.float64)
    for block, wide in paired_blocks(xp, xp.ascontiguousarray(x).reshape(-1), scratch=1, dtype=np.float64):
        wide[...] = block
        wide *= wide
        total = total + wide.sum()
    return total


def _bias_corrections(lr: float, beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """lr / (1 - beta1^step) and sqrt(1 - beta2^step), as Python floats: NumPy's would promote float32 arrays."""
    return float(lr / (1.0 - beta1**step)), math.sqrt(1.0 - beta2**step)


def _flat(x: Array) -> Array:
    assert x.flags.c_contiguous, "AdamW updates in place and works on flat views"
    return x.reshape(-1)
