"""Records what every layer of a model returns, forward and backward, by standing in the layers' places.

What lies between two layers that are stood in for is recorded too, see `trace/stand_in.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.models.model import CausalLM
from mpitp.trace import stand_in
from mpitp.trace.stand_in import FORWARD, LayerObserver, Parts, Spot

Array = Any

# Kinds of records in the order in which they are computed, and what one shows.
KINDS = {
    "start": "weights at the start",
    "y": "output",
    "dx": "gradient of the input",
    "grad": "parameter gradient",
    "value": "value",
    "update": "change of the weights",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One array of one rank. `parts`: how it is cut along `dim` over the ranks; None: every rank claims the whole."""

    name: str
    kind: str  # of KINDS
    array: np.ndarray
    parts: Parts | None = None
    dim: int = 1


@dataclass(slots=True)
class Log(LayerObserver):
    """The records of one pass, in the order in which they were made: what layers return, `y` forward, `dx` backward."""

    records: list[Record] = field(default_factory=list)
    is_open: bool = True

    def add(self, name: str, kind: str, array: Array, parts: Parts | None = None, dim: int = 1) -> None:
        """Keep a copy in host memory; nothing while the log is closed."""
        if self.is_open:
            self.records.append(Record(name, kind, np.array(to_host(array)), parts, dim))

    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        return self._forward(spot, args[0], run) if phase == FORWARD else self._backward(spot, args[0], run)

    def _forward(self, spot: Spot, x: Array, run: Callable[[], Any]) -> tuple[Array, Any]:
        if spot.before is not None:
            self.add(spot.before, "y", x, spot.x_parts)
        y, ctx = run()
        self.add(spot.name, "y", y, spot.y_parts, y.ndim - 1)
        return y, ctx

    def _backward(self, spot: Spot, dy: Array, run: Callable[[], Any]) -> Array:
        if spot.after is not None:
            self.add(spot.after, "dx", dy, spot.y_parts)
        dx = run()
        if dx is not None:
            self.add(spot.name, "dx", dx, spot.x_parts)
        return dx


def attach(model: CausalLM) -> Log:
    """Record every layer of `model` from now on, into the log that is returned."""
    log = Log()
    stand_in.attach(model, log)
    return log


def record_params(model: CausalLM, log: Log, kind: str) -> None:
    """Add every parameter's gradient (`kind` "grad") or value to the log."""
    for name, param in model.named_params():
        array = param.grad if kind == "grad" else param.data
        if array is None:
            array = np.zeros(param.spec.shape, model.dtype)
        log.add(name, kind, array, param.spec.parts, param.spec.dim)


def record_updates(model: CausalLM, log: Log) -> None:
    """Add what every parameter has changed by since it was recorded at the start.

    The change tells more than the new weights, most of whose digits are the old ones'.
    """
    start = {record.name: record.array for record in log.records if record.kind == "start"}
    for name, param in model.named_params():
        log.add(name, "update", to_host(param.data) - start[name], param.spec.parts, param.spec.dim)
