"""A parameter and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.layers.deferral import Deferral
from mpitp.layers.placement import Placement


@dataclass(slots=True, eq=False)
class Param:
    """An array with its gradient. Gradients are accumulated: backward adds, the optimizer's `zero_grad` clears.

    `grad` is None until the first `accumulate`, so that the first product can be written straight into place. It has
    `grad_dtype`: float32 where the array is stored in 16 bits.
    """

    data: Array
    placement: Placement
    init_std: float = 0.0  # standard deviation of the initial values; 0: constant `init_value`
    init_value: float = 0.0
    decay: bool = True  # whether weight decay applies (matrices yes; biases and norm weights no)
    grad: Array | None = field(default=None)
    deferral: Deferral | None = None  # through which gradients are added, where they aren't at once

    def accumulate(self, grad: Array) -> None:
        """Add to the gradient. The array is taken over when it is the first one: don't write to it afterwards."""
        self.accumulate_made(lambda: grad)

    def accumulate_made(self, make: Callable[[], Array]) -> None:
        """Add the gradient that `make()` computes: now, or when the deferral has it done."""
        if self.deferral is None:
            self._add(make())
        else:
            self.deferral.run(lambda: self._add(make()))

    def _add(self, grad: Array) -> None:
        if self.grad is None:
            self.grad = grad.astype(self.grad_dtype, copy=False)
        else:
            self.grad += grad

    @property
    def grad_dtype(self) -> np.dtype:
        """What gradients are added up in."""
        return wide_dtype(self.data.dtype)

    def grad_or_zeros(self) -> Array:
        """The gradient; zeros where backward has left none."""
        if self.grad is not None:
            return self.grad
        return array_module(self.data).zeros(self.data.shape, self.grad_dtype)
