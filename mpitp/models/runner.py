"""How the microbatches of a step go through a model: what a training step and a verification hand them to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mpitp.backend.arrays import Array
from mpitp.models.batch import Batch
from mpitp.models.layered import LayeredModel


@dataclass(frozen=True, slots=True)
class Measure:
    """`count` numbers that a microbatch's logits come to, beside its loss. `of`: makes them, a collective over tp."""

    count: int
    of: Callable[[LayeredModel, Array, Batch], Sequence[float]]


NOTHING = Measure(0, lambda model, logits, batch: ())


class Runner(ABC):
    """Runs microbatches through the model of this rank. All methods are collectives over the ranks that hold it.

    Losses are summed over their targets, and equal on all ranks that share the rows; a runner may return one for all
    microbatches together.
    """

    @abstractmethod
    def __call__(self, batches: Sequence[Batch], scale: float) -> list[float]:
        """Forward and backward: the microbatches' losses. `scale` times their gradients are added up."""

    @abstractmethod
    def rounds(self, batches: Sequence[Batch]) -> int:
        """How often it tells its progress that gradients are there: after each microbatch, or once for all."""

    @abstractmethod
    def measure(self, batches: Iterable[Batch], measure: Measure) -> list[list[float]]:
        """Of each microbatch the loss and, behind it, what is measured, without gradients."""

    def forward(self, batches: Iterable[Batch]) -> list[float]:
        """The microbatches' losses, without gradients."""
        return [loss for (loss,) in self.measure(batches, NOTHING)]


class Progress:
    """Is told how far backward is, to start what can be started. This one does nothing."""

    def layer_done(self, name: str) -> None:
        """The layer's gradients of this microbatch are there."""

    def batch_done(self) -> None:
        """All gradients of this microbatch, or of all of a step that are told at once, are."""


class PlainRunner(Runner):
    """One microbatch after the other through a model of which this rank holds all layers."""

    def __init__(self, model: LayeredModel, progress: Progress | None = None) -> None:
        self.model, self.progress = model, progress or Progress()

    def __call__(self, batches: Sequence[Batch], scale: float) -> list[float]:
        losses = []
        for batch in batches:
            loss, ctx = self.model.loss_forward(batch)
            self.model.loss_backward(ctx, scale, self.progress.layer_done)
            self.progress.batch_done()
            losses.append(loss)
        return losses

    def rounds(self, batches: Sequence[Batch]) -> int:
        return len(batches)

    def measure(self, batches: Iterable[Batch], measure: Measure) -> list[list[float]]:
        found = []
        for batch in batches:
            logits, loss, _ = self.model.scored(batch)
            found.append([loss, *measure.of(self.model, logits, batch)])
        return found
