"""One optimizer step: forward and backward over the microbatches, gradient norm, clipping, update.

    loss = sum over microbatches of summed losses / number of targets in the whole step

so that gradient accumulation over 4 microbatches of 1 gives what 1 microbatch of 4 gives: every target weighs the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.errors import ConfigError, NumericError
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.optim.adamw import AdamW
from mpitp.optim.grad_norm import GradNorm


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to: mean loss in nats a token, gradient norm before clipping, targets counted."""

    loss: float
    grad_norm: float
    tokens: int


class TrainStep:
    """Runs optimizer steps on one model.

    `clip_norm` > 0: gradients are scaled down so that their global norm is at most that (Pascanu et al. 2013).
    """

    def __init__(self, model: CausalLM, optimizer: AdamW, clip_norm: float = 0.0) -> None:
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm
        self.grad_norm = GradNorm(model.named_params(), model.layout.group)

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Train on the microbatches of one step. Raises NumericError, with nothing updated, when it isn't finite."""
        self.model.zero_grad()  # what a caller has left there, or a step that was given up
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # what comes of them is looked at below
            loss, tokens = self.accumulate(batches)
            norm = self.grad_norm()
        loss, norm = self._agreed(loss, norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericError(
                f"loss {loss} and gradient norm {norm} at step {self.optimizer.steps_done + 1}: training can't go on; "
                "the weights are as they were before this step. A lower learning rate or a longer warmup may help"
            )
        self.optimizer.step(lr, clip_scale(norm, self.clip_norm))
        return StepResult(loss, norm, tokens)

    def accumulate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Mean loss over all targets of the microbatches, and their number; its gradients are added up."""
        tokens = sum(batch.num_targets for batch in batches)
        if not tokens:
            raise ConfigError("a step without a single target; give batches with targets")
        total = 0.0
        for batch in batches:
            loss, ctx = self.model.loss_forward(batch)
            self.model.loss_backward(ctx, 1.0 / tokens)
            total += loss
        return total / tokens, tokens

    def _agreed(self, *numbers: float) -> tuple[float, ...]:
        """Rank 0's numbers on every rank, so that all take the same branch."""
        return tuple(float(x) for x in self.model.layout.group.broadcast(np.array(numbers)))


def clip_scale(norm: float, clip_norm: float) -> float:
    """The factor that brings a gradient of this norm down to `clip_norm` (0: no clipping), as PyTorch computes it."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0


def evaluate(model: CausalLM, batches: Sequence[Batch]) -> float:
    """Mean loss over all targets of the batches; no gradients."""
    total, tokens = 0.0, 0
    for batch in batches:
        total += model.loss_forward(batch)[0]
        tokens += batch.num_targets
    if not tokens:
        raise ConfigError("an evaluation without a single target; give batches with targets")
    return total / tokens
