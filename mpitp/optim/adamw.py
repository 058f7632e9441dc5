"""AdamW over the parameters of this rank: the state is cut as the parameters are, and nothing is communicated.

Replicas (norm weights, shared KV heads) get equal gradients and hence stay equal on all ranks.

A parameter stored in 16 bits has a *master* in float32: the update is made there, and the parameter is the master
rounded. Without masters an update below half of bfloat16's step, lr < 2^-9 |w|, would be lost (Micikevicius et al.
2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import is_half, widened
from mpitp.layers.param import Param
from mpitp.ops.adamw import AdamWRule, adamw_update
from mpitp.optim.loss_scale import LossScale


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Loshchilov & Hutter 2019; `weight_decay` applies to matrices only (`Param.decay`)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


class AdamW:
    """First and second moments of every parameter, masters of those in 16 bits, and the step that uses them.

    `loss_scale`: what the gradients are multiplied by when they come here; who calls `step` divides by it. `dtype`: of
    the model, by which all ranks have the same scale; None: that of the parameters, of which there must be one.
    """

    def __init__(self, named_params: Iterable[tuple[str, Param]], settings: AdamWSettings, dtype: Any = None) -> None:
        self.params, self.settings, self.steps_done = list(named_params), settings, 0
        self.moments: dict[str, tuple[Array, Array]] = {}
        self.masters: dict[str, Array] = {}
        for name, param in self.params:
            xp, shape = array_module(param.data), param.data.shape
            self.moments[name] = (xp.zeros(shape, param.grad_dtype), xp.zeros(shape, param.grad_dtype))
            if is_half(param.data.dtype):
                self.masters[name] = widened(param.data)
        self.loss_scale = LossScale.of(self.params[0][1].data.dtype if dtype is None else dtype)

    def step(self, lr: float, grad_scale: float = 1.0) -> None:
        """Update every parameter with `grad_scale` times its gradient, then forget the gradients."""
        self.steps_done += 1
        for name, param in self.params:
            if param.grad is None:
                continue
            weights, (m, v) = self.weights(name, param), self.moments[name]
            decay = self.settings.weight_decay if param.decay else 0.0
            rule = AdamWRule(lr, *self.settings.betas, self.settings.eps, decay, self.steps_done)
            adamw_update(weights, param.grad, m, v, rule, grad_scale)
            if weights is not param.data:
                param.data[...] = weights
            param.grad = None

    def weights(self, name: str, param: Param) -> Array:
        """What the update changes: the master, or the parameter itself."""
        return self.masters.get(name, param.data)

    def round_masters(self) -> None:
        """Make every parameter in 16 bits its master rounded: masters have been loaded."""
        for name, param in self.params:
            if name in self.masters:
                param.data[...] = self.masters[name]
