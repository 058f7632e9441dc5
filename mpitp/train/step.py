"""One optimizer step: forward and backward over the microbatches, gradient norm, clipping, update.

    loss = sum over microbatches of summed losses / number of targets in the whole step

so that gradient accumulation over 4 microbatches of 1 gives what 1 microbatch of 4 gives: every target weighs the same,
whatever rank has it. Losses of microbatches are added by one correctly rounded sum, in whatever order they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.comm.group import Group
from mpitp.errors import ConfigError, NumericError
from mpitp.layers.shards import ranks_along
from mpitp.layers.site import DATA_AXES, Site
from mpitp.models.batch import Batch
from mpitp.models.layered import LayeredModel
from mpitp.models.runner import NOTHING, Measure, PlainRunner, Runner
from mpitp.optim.adamw import AdamW
from mpitp.optim.grad_norm import GradNorm, clip_scale
from mpitp.optim.reduction import Reduction, make_reduction


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to: mean loss in nats a token, gradient norm before clipping, targets counted."""

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False  # its gradients overflowed float16: nothing was updated


class TrainStep:
    """Runs optimizer steps on one model.

    `optimizer`: of the parameters that the reduction names (all of the model's, unless it deals them to the ranks).
    `world`: the ranks that must agree on whether a step is finite; None: those that the model is laid on.
    `clip_norm` > 0: gradients are scaled down so that their global norm is at most that (Pascanu et al. 2013).
    `runner`: how the microbatches go through the model; None: one after the other, and `reduction` follows them.
    """

    def __init__(
        self,
        model: LayeredModel,
        optimizer: AdamW,
        clip_norm: float = 0.0,
        world: Group | None = None,
        runner: Runner | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm
        self.world = world or model.site.ranks
        self.reduction = reduction or make_reduction(model)
        self.runner = runner or PlainRunner(model, self.reduction)
        self.data = ranks_along(model.site.mesh, DATA_AXES)
        self.ep = ranks_along(model.site.mesh, ["ep"])
        self.grad_norm = GradNorm(self.reduction.counted, model.site.ranks)
        if model.site.num_blocks:
            _refuse_partial(model)

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Train on this rank's microbatches of one step; it may have none while others have.

        Raises NumericError, with nothing updated, when the step isn't finite.
        """
        with quiet_overflow():
            loss, tokens = self.accumulate(batches)
            norm = self.grad_norm() / self.optimizer.loss_scale.scale
        loss, norm = self._agreed(loss, norm)
        if self.optimizer.loss_scale.leaves_out(loss, norm):
            return self._skipped(loss, norm, tokens)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericError(
                f"loss {loss} and gradient norm {norm} at step {self.optimizer.steps_done + 1}: training can't go on; "
                "the weights are as they were before this step. A lower learning rate or a longer warmup may help"
            )
        with quiet_overflow():
            self.optimizer.step(lr, clip_scale(norm, self.clip_norm) / self.optimizer.loss_scale.scale)
        self.optimizer.loss_scale.after_clean_step()
        self.reduction.updated()
        return StepResult(loss, norm, tokens)

    def _skipped(self, loss: float, norm: float, tokens: int) -> StepResult:
        """A step whose gradients have overflowed, on all ranks alike."""
        self.model.zero_grad()
        self.optimizer.loss_scale.after_overflow()
        return StepResult(loss, norm, tokens, skipped=True)

    def accumulate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Mean loss over all targets of the step, and their number; the gradients, times the loss scale, are those of
        the whole step.
        """
        batches = self._with_idle(batches)
        counts = self.data.all_gather(
            np.array([[sum(batch.num_targets for batch in batches), self.runner.rounds(batches)]])
        )
        tokens, rounds = int(counts[:, 0].sum()), int(counts[:, 1].max())
        if not tokens:
            raise ConfigError("a step without a single target; give batches with targets")
        self.reduction.begin(rounds)
        losses = self.runner(batches, self.optimizer.loss_scale.scale / tokens)
        self.reduction.finish()
        return total_of(losses, self.data) / tokens, tokens

    def _with_idle(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """As many as any rank along ep has, since those exchange rows in every pass: idle ones behind."""
        most = int(self.ep.all_reduce(np.array([len(batches)]), op="max")[0])
        return [*batches, *(idle_batch(self.model.site) for _ in range(most - len(batches)))]

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The model's mean loss over all ranks' batches."""
        return evaluate(self.model, batches, self.runner, self.reduction)

    def measure(self, batches: Iterable[Batch], measure: Measure) -> tuple[int, list[float]]:
        """See `measured`."""
        return measured(self.model, batches, measure, self.runner, self.reduction)

    def _agreed(self, *numbers: float) -> tuple[float, ...]:
        """The first rank's numbers on every rank, so that all take the same branch."""
        return tuple(float(x) for x in self.world.broadcast(np.array(numbers)))


def quiet_overflow() -> np.errstate:
    """Where NumPy needn't warn: a loss that comes of numbers that aren't finite is looked at, and ends the run."""
    return np.errstate(over="ignore", divide="ignore", invalid="ignore")


def idle_batch(site: Site) -> Batch:
    """A rank's part of a microbatch without rows, run for its collectives."""
    return Batch.idle().cut(site.mesh["cp"].rank, site.mesh["cp"].size)


def _refuse_partial(model: LayeredModel) -> None:
    """What is summed when backward is done is summed rank by rank: its bits depend on how many ranks there are."""
    for name, param in model.named_params():
        if "tp" in param.placement.partial:
            raise ConfigError(
                f"{name}: its gradient is partial along tp, and the ranks' summands add up to other bits at another "
                "number of ranks; the invariant mode can't train it, train without (train.invariant = false)"
            )


def total_of(losses: Sequence[float], data: Group) -> float:
    """The sum of all ranks' losses, correctly rounded: the same however they are dealt. A collective."""
    everyones = data.all_gather(np.array(losses, np.float64))
    return math.fsum(everyones) if np.isfinite(everyones).all() else float(everyones.sum())


def evaluate(
    model: LayeredModel, batches: Iterable[Batch], runner: Runner | None = None, reduction: Reduction | None = None
) -> float:
    """Mean loss over all targets of all ranks' batches; no gradients. A collective over the axes of data."""
    tokens, (loss,) = measured(model, batches, NOTHING, runner, reduction)
    return loss / tokens


def measured(
    model: LayeredModel,
    batches: Iterable[Batch],
    measure: Measure,
    runner: Runner | None = None,
    reduction: Reduction | None = None,
) -> tuple[int, list[float]]:
    """Number of targets in all ranks' batches, the sum of their losses and of what is measured; no gradients."""
    data, counts = ranks_along(model.site.mesh, DATA_AXES), [0]
    idle = reduction.idle_forward if reduction is not None else None
    joining = idle_batch(model.site) if model.site.mesh.sizes["ep"] > 1 else None
    found = (runner or PlainRunner(model)).measure(_in_step(batches, data, counts, idle, joining), measure)
    tokens = int(data.all_reduce(np.array([sum(counts)]))[0])
    if not tokens:
        raise ConfigError("an evaluation without a single target; give batches with targets")
    return tokens, [total_of([row[i] for row in found], data) for i in range(1 + measure.count)]


def _in_step(
    batches: Iterable[Batch],
    data: Group,
    counts: list[int],
    idle: Callable[[], None] | None,
    joining: Batch | None,
) -> Iterator[Batch]:
    """This rank's batches, one whenever the others take one too; while they have more, `joining` where there is such,
    else `idle`. Targets are counted.
    """
    mine = iter(batches)
    while data.all_reduce(np.array([(batch := next(mine, None)) is not None], np.int32), op="max")[0]:
        batch = joining if batch is None else batch
        if batch is not None:
            counts.append(batch.num_targets)
            yield batch
        elif idle is not None:
            idle()
