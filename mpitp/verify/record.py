"""Records what every layer of a model returns, forward and backward, by standing in the layers' places.

The layers know nothing of it: `attach` puts a `Recorded` where a layer was, and takes nothing out of the path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.layers.block import TransformerBlock
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.mlp import GeluMLP
from mpitp.layers.param import Param, Part
from mpitp.models.model import CausalLM

Array = Any
Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One array of one rank. `parts`: how it is cut along `dim` over the ranks; None: every rank claims the whole."""

    name: str
    kind: str  # y, dx, dy (of a column-parallel linear's output), grad, weight, value
    array: np.ndarray
    parts: Parts | None = None
    dim: int = 1


@dataclass(slots=True)
class Log:
    """The records of one pass, in the order in which they were made."""

    records: list[Record] = field(default_factory=list)

    def add(self, name: str, kind: str, array: Array, parts: Parts | None = None, dim: int = 1) -> None:
        """Keep a copy in host memory."""
        self.records.append(Record(name, kind, np.array(to_host(array)), parts, dim))


class Recorded:
    """A layer that writes down what it returns: `y` forward, `dx` backward."""

    def __init__(
        self, layer: Any, name: str, log: Log, y_parts: Parts | None = None, dx_parts: Parts | None = None
    ) -> None:
        self.layer, self.name, self.log, self.y_parts, self.dx_parts = layer, name, log, y_parts, dx_parts

    def forward(self, *args: Any) -> tuple[Array, Any]:
        """The layer's own forward."""
        y, ctx = self.layer.forward(*args)
        self.log.add(self.name, "y", y, self.y_parts, y.ndim - 1)
        return y, ctx

    def backward(self, dy: Array, ctx: Any) -> Array:
        """The layer's own backward; a cut output's gradient is written down too, it is nobody's dx."""
        if self.y_parts is not None:
            self.log.add(self.name, "dy", dy, self.y_parts)
        dx = self.layer.backward(dy, ctx)
        if dx is not None:
            self.log.add(self.name, "dx", dx, self.dx_parts)
        return dx

    def params(self) -> dict[str, Param]:
        """The layer's own parameters."""
        return self.layer.params()


def attach(model: CausalLM) -> Log:
    """Record every layer of `model` from now on, into the log that is returned."""
    log = Log()
    vocab_parts = model.head.weight.spec.parts
    _wrap(model, "embedding", "embedding", log)
    for i, block in enumerate(model.blocks):
        _attach_block(block, f"blocks.{i}", log)
        model.blocks[i] = Recorded(block, f"blocks.{i}", log)  # type: ignore[call-overload]
    _wrap(model, "final_norm", "final_norm", log)
    _wrap(model, "head", "head", log)
    model.loss = Recorded(model.loss, "loss", log, dx_parts=vocab_parts)  # type: ignore[assignment]
    return log


def record_params(model: CausalLM, log: Log, kind: str) -> None:
    """Add every parameter's gradient (`kind` "grad") or value ("weight") to the log."""
    for name, param in model.named_params():
        array = param.grad if kind == "grad" else param.data
        if array is None:
            array = np.zeros(param.spec.shape, model.dtype)
        log.add(name, kind, array, param.spec.parts, param.spec.dim)


def _attach_block(block: TransformerBlock, name: str, log: Log) -> None:
    _wrap(block.attention, "qkv", f"{name}.attention.qkv", log)
    _wrap(block.attention, "out", f"{name}.attention.out", log)
    up = "up" if isinstance(block.mlp, GeluMLP) else "gate_up"
    _wrap(block.mlp, up, f"{name}.mlp.{up}", log)
    _wrap(block.mlp, "down", f"{name}.mlp.down", log)
    for layer_name, _ in block.layers():
        _wrap(block, layer_name, f"{name}.{layer_name}", log)


def _wrap(owner: Any, attribute: str, name: str, log: Log) -> None:
    layer = getattr(owner, attribute)
    y_parts = layer.weight.spec.parts if isinstance(layer, ColumnParallelLinear) else None
    dx_parts = layer.weight.spec.parts if isinstance(layer, RowParallelLinear) else None
    setattr(owner, attribute, Recorded(layer, name, log, y_parts, dx_parts))
