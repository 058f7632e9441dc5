"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warmup, then constant or a cosine down to `min_lr` at the last step (Loshchilov & Hutter 2017, eq. 5).

    Steps count from 1. Step `warmup_steps` (without a warmup: step 1) has the full rate, step `steps` has `min_lr`.
    """

    lr: float
    steps: int
    warmup_steps: int = 0
    kind: str = "cosine"
    min_lr: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of optimizer step `step`."""
        if step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        first = max(self.warmup_steps, 1)
        progress = min((step - first) / max(self.steps - first, 1), 1.0)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
