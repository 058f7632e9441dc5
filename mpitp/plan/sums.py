r"""Seconds in the collectives of a layer on a machine: what is waited for, and what runs behind products.

Of a column-parallel product's dx at most the time of its dW is hidden; between nodes also three quarters of the time of
a row-parallel product behind the sum of its y, which goes in four pieces; of a ring of keys at most the attention's own
time. In each case no more than the part of a sum that the machine moves on behind products (`overlap`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpitp.layers.attention import AttentionHeads
from mpitp.layers.experts import Experts
from mpitp.layers.layer import BACKWARD, FORWARD, Layer, Send
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.plan.kept import Sizes
from mpitp.plan.machine_file import Machine

PIECES_HIDDEN = 0.75
MESSAGES = ("send", "broadcast")  # one after the other


@dataclass(frozen=True, slots=True)
class Span:
    """The ranks of a group: so many of each node, on so many nodes."""

    in_node: int
    nodes: int

    @classmethod
    def of(cls, size: int, stride: int, ranks_per_node: int) -> Span:
        """`size` ranks, each `stride` behind the one before."""
        in_node = max(1, min(size, ranks_per_node // stride))
        return cls(in_node, -(-size // in_node))

    @property
    def size(self) -> int:
        """All of them."""
        return self.in_node * self.nodes


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds: waited for in the forward and in the backward pass, and hidden in both."""

    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Waits) -> Waits:
        return Waits(self.forward + other.forward, self.backward + other.backward, self.hidden + other.hidden)


@dataclass(frozen=True, slots=True)
class Behind:
    """Seconds of a layer's own work, forward and of the gradients of its weights, that a sum can run behind."""

    forward: float
    weight_grad: float


def waits_of(layer: Layer, axis: str, span: Span, sizes: Sizes, behind: Behind, machine: Machine) -> Waits:
    """Of what one layer sends along an axis, its children not counted."""
    total = Waits()
    for send in layer.sends():
        if send.axis == axis and span.size > 1 and send.op != "recv":
            seconds = send.calls * call_seconds(send, span, _sizes_for(layer, send, sizes), machine)
            room = _room(layer, send, span, behind)
            hidden = min(machine.overlap(span.nodes) * seconds, room)
            waited = seconds - hidden
            total += Waits(waited, 0.0, hidden) if send.phase == FORWARD else Waits(0.0, waited, hidden)
    return total


def _sizes_for(layer: Layer, send: Send, sizes: Sizes) -> Sizes:
    """What experts scatter is told for each row that they take, a shard of those that they scatter."""
    is_of_shard = isinstance(layer, Experts) and send.op == "reduce_scatter"
    return replace(sizes, rows=sizes.shard) if is_of_shard else sizes


def call_seconds(send: Send, span: Span, sizes: Sizes, machine: Machine) -> float:
    """Of one call over all rows of a pass."""
    num_bytes = sizes.rows * send.width * (sizes.wide if send.is_wide else sizes.item)
    return collective_seconds(send.op, num_bytes, span, machine)


def collective_seconds(op: str, num_bytes: float, span: Span, machine: Machine) -> float:
    """Of one collective over `num_bytes` (of the whole array, where ranks have pieces), or of one message."""
    if op == "recv":
        return 0.0  # with its send
    if op in MESSAGES:
        return machine.send(num_bytes, is_wide=span.nodes > 1)
    share = 1.0 if op.startswith("all_reduce") else 0.5
    return machine.sum_seconds(num_bytes, span.in_node, span.nodes, share)


def _room(layer: Layer, send: Send, span: Span, behind: Behind) -> float:
    """Seconds of the layer's own work while such a collective is under way."""
    if isinstance(layer, AttentionHeads) and send.op == "send":
        return behind.forward
    if isinstance(layer, ColumnParallelLinear) and send.phase == BACKWARD:
        return behind.weight_grad
    if isinstance(layer, RowParallelLinear) and send.op.startswith("all_reduce") and span.nodes > 1:
        return PIECES_HIDDEN * behind.forward
    return 0.0
