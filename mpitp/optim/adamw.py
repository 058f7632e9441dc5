"""AdamW over the parameters of this rank: the state is cut as the parameters are, and nothing is communicated.

Replicas (norm weights, shared KV heads) get equal gradients and hence stay equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.layers.param import Param
from mpitp.ops.adamw import adamw_update

Array = Any


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Loshchilov & Hutter 2019; `weight_decay` applies to matrices only (`Param.decay`)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


class AdamW:
    """First and second moments of every parameter, and the step that uses them."""

    def __init__(self, named_params: Iterable[tuple[str, Param]], settings: AdamWSettings) -> None:
        self.params, self.settings, self.steps_done = list(named_params), settings, 0
        self.moments: dict[str, tuple[Array, Array]] = {}
        for name, param in self.params:
            xp = array_module(param.data)
            self.moments[name] = (xp.zeros_like(param.data), xp.zeros_like(param.data))

    def step(self, lr: float, grad_scale: float = 1.0) -> None:
        """Update every parameter with `grad_scale` times its gradient, then forget the gradients."""
        self.steps_done += 1
        beta1, beta2 = self.settings.betas
        for name, param in self.params:
            if param.grad is None:
                continue
            m, v = self.moments[name]
            adamw_update(
                param.data, param.grad, m, v, lr=lr, beta1=beta1, beta2=beta2, eps=self.settings.eps,
                weight_decay=self.settings.weight_decay if param.decay else 0.0, step=self.steps_done,
                grad_scale=grad_scale,
            )  # fmt: skip
            param.grad = None
