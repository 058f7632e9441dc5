"""Records what every layer of a model returns, forward and backward, by standing in the layers' places.

The layers know nothing of it: `attach` puts a `Recorded` where a layer was, and takes nothing out of the path. What
lies between two recorded layers (the heads between qkv and out, the activation between up and down) is recorded too:
its output is the input of the layer after it, and the gradient of its input is what the layer before it gets backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.layers.block import TransformerBlock
from mpitp.layers.dropout import Dropout
from mpitp.layers.mlp import GeluMLP
from mpitp.layers.param import Param, Part
from mpitp.layers.sequences import Sequences
from mpitp.models.model import CausalLM

Array = Any
Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One array of one rank. `parts`: how it is cut along `dim` over the ranks; None: every rank claims the whole."""

    name: str
    kind: str  # start, y, dx, grad, update, value
    array: np.ndarray
    parts: Parts | None = None
    dim: int = 1


@dataclass(slots=True)
class Log:
    """The records of one pass, in the order in which they were made."""

    records: list[Record] = field(default_factory=list)
    is_open: bool = True

    def add(self, name: str, kind: str, array: Array, parts: Parts | None = None, dim: int = 1) -> None:
        """Keep a copy in host memory; nothing while the log is closed."""
        if self.is_open:
            self.records.append(Record(name, kind, np.array(to_host(array)), parts, dim))


@dataclass(slots=True)
class Recorded:
    """A layer that writes down what it returns: `y` forward, `dx` backward.

    `before` and `after` name what stands between it and the neighbouring recorded layers; None: nothing does.
    """

    layer: Any
    name: str
    log: Log
    x_parts: Parts | None = None
    y_parts: Parts | None = None
    before: str | None = None
    after: str | None = None

    def forward(self, *args: Any) -> tuple[Array, Any]:
        """The layer's own forward."""
        if self.before is not None:
            self.log.add(self.before, "y", args[0], self.x_parts)
        y, ctx = self.layer.forward(*args)
        self.log.add(self.name, "y", y, self.y_parts, y.ndim - 1)
        return y, ctx

    def backward(self, dy: Array, ctx: Any) -> Array:
        """The layer's own backward."""
        if self.after is not None:
            self.log.add(self.after, "dx", dy, self.y_parts)
        dx = self.layer.backward(dy, ctx)
        if dx is not None:
            self.log.add(self.name, "dx", dx, self.x_parts)
        return dx

    def params(self) -> dict[str, Param]:
        """The layer's own parameters."""
        return self.layer.params()


@dataclass(slots=True)
class RecordedDropout:
    """A dropout that writes down what it returns."""

    layer: Dropout
    name: str
    log: Log

    def forward(self, x: Array, seqs: Sequences) -> Array:
        """The dropout's own forward."""
        y = self.layer.forward(x, seqs)
        self.log.add(self.name, "y", y)
        return y

    def backward(self, dy: Array, seqs: Sequences) -> Array:
        """The dropout's own backward."""
        dx = self.layer.backward(dy, seqs)
        self.log.add(self.name, "dx", dx)
        return dx


def attach(model: CausalLM) -> Log:
    """Record every layer of `model` from now on, into the log that is returned."""
    log = Log()
    vocab_parts = model.head.weight.spec.parts
    model.embedding = Recorded(model.embedding, "embedding", log)  # type: ignore[assignment]
    if model.positions is not None:
        model.positions = Recorded(model.positions, "positions", log)  # type: ignore[assignment]
    model.embedding_dropout = _dropout(model.embedding_dropout, "embedding dropout", log)
    for i, block in enumerate(model.blocks):
        _attach_block(block, f"blocks.{i}", log)
        model.blocks[i] = Recorded(block, f"blocks.{i}", log)  # type: ignore[call-overload]
    model.final_norm = Recorded(model.final_norm, "final_norm", log)  # type: ignore[assignment]
    model.head = Recorded(model.head, "head", log, y_parts=vocab_parts)  # type: ignore[assignment]
    model.loss = Recorded(model.loss, "loss", log, x_parts=vocab_parts)  # type: ignore[assignment]
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


def _attach_block(block: TransformerBlock, name: str, log: Log) -> None:
    _attach_pair(block.attention, "qkv", "out", f"{name}.attention", "heads", log)
    up = "up" if isinstance(block.mlp, GeluMLP) else "gate_up"
    _attach_pair(block.mlp, up, "down", f"{name}.mlp", "activation", log)
    first, second = block.dropouts
    block.dropouts = (_dropout(first, f"{name}.dropout1", log), _dropout(second, f"{name}.dropout2", log))
    for layer_name, layer in block.layers():
        setattr(block, layer_name, Recorded(layer, f"{name}.{layer_name}", log))


def _attach_pair(owner: Any, first: str, last: str, name: str, between: str, log: Log) -> None:
    """A column-parallel linear, something between, and a row-parallel linear."""
    column, row, middle = getattr(owner, first), getattr(owner, last), f"{name}.{between}"
    y_parts, x_parts = column.weight.spec.parts, row.weight.spec.parts
    setattr(owner, first, Recorded(column, f"{name}.{first}", log, y_parts=y_parts, after=middle))
    setattr(owner, last, Recorded(row, f"{name}.{last}", log, x_parts=x_parts, before=middle))


def _dropout(layer: Dropout, name: str, log: Log) -> Any:
    """The dropout recorded, unless it drops nothing."""
    return RecordedDropout(layer, name, log) if layer.rate else layer
