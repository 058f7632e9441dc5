"""Gradients where the weights themselves are dealt (ZeRO-3): each layer has seen to its own (`layers/gathered.py`)."""

from __future__ import annotations

from mpitp.layers.gathered import gathered_layers
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.models.layered import LayeredModel
from mpitp.optim.reduction import Reduction


class WithDealtWeights(Reduction):
    """Makes up for microbatches that others have and this rank hasn't, and waits for what is on its way.

    `idle_passes`: forward and backward passes without rows that it has joined so far.
    """

    def __init__(self, model: LayeredModel) -> None:
        self.params = self.counted = list(model.named_params())
        self.layers = gathered_layers(model.layers)
        self.rounds = self.rounds_done = 0
        self.idle_passes = {FORWARD: 0, BACKWARD: 0}

    def begin(self, rounds: int) -> None:
        self.rounds, self.rounds_done = rounds, 0
        self.updated()
        for _, param in self.params:
            param.grad = None

    def batch_done(self) -> None:
        self.rounds_done += 1

    def finish(self) -> None:
        for _ in range(self.rounds - self.rounds_done):
            self.idle_forward()
            self.idle_passes[BACKWARD] += 1
            for layer in reversed(self.layers):
                layer.idle_backward()
        self.layers[0].scatters.finish()

    def updated(self) -> None:
        """What was gathered ahead is of weights that are no more."""
        for layer in self.layers:
            layer.drop()

    def idle_forward(self) -> None:
        """Join the collectives of a pass without rows."""
        self.idle_passes[FORWARD] += 1
        for layer in self.layers:
            layer.idle_forward()
