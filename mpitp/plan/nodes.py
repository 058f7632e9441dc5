"""The nodes of an operator graph: what a rank does by itself, and what it takes part in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from mpitp.trace.traffic import wire_bytes

UPDATE = "update"  # the phase behind all microbatches


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array between two nodes, as one rank has it: [rows, width], and its letter along each axis."""

    rows: int
    width: int
    item: int
    letters: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of this rank's array."""
        return self.rows * self.width * self.item

    def along(self, axis: str, letter: str) -> Tensor:
        """The same with another letter along an axis."""
        return replace(self, letters=tuple((each, letter if each == axis else old) for each, old in self.letters))

    def __str__(self) -> str:
        letters = " ".join(f"{axis}:{letter}" for axis, letter in self.letters)
        return f"[{self.rows}, {self.width}] {letters}".rstrip()


@dataclass(frozen=True, slots=True)
class Node:
    """What all nodes have: a name of their own, the layer, the pass, whose output they take, and what they give.

    `passes`: how often a microbatch runs it (2: backward runs a forward again).
    """

    name: str
    layer: str
    phase: str
    inputs: tuple[str, ...]
    output: Tensor | None
    passes: int = 1


@dataclass(frozen=True, slots=True)
class Operation(Node):
    """A rank's own work: flops of its products, bytes read and written, bytes kept for backward, all of one pass.

    `shape`: t, n and k of a product; of attention a sequence's length, heads and their width.
    """

    kind: str = ""
    flops: int = 0
    moved_bytes: int = 0
    kept_bytes: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Collective(Node):
    """`calls` of a collective along `axis`, over `ranks`; this rank hands in `given_bytes` in all of them together, a
    pass. `axis`: several are "dp+cp". `is_hidden`: it can run behind the layer's own work.
    """

    op: str = ""
    axis: str = ""
    ranks: int = 1
    calls: int = 1
    given_bytes: Fraction = Fraction(0)
    is_hidden: bool = False

    @property
    def wire_bytes(self) -> float:
        """What the textbook algorithm sends from this rank (`trace/traffic.py`)."""
        given = float(self.given_bytes)
        result = given if self.op.startswith("all_reduce_in_order") else 0.0
        return wire_bytes(self.op, self.ranks, given, result)

    @property
    def is_message(self) -> bool:
        """Whether it joins stages (an inter-operator cut), not the shards of one operator."""
        return self.axis == "pp"


@dataclass(slots=True)
class RankGraph:
    """The nodes of one rank's microbatch, in the order in which they run, by name."""

    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def operations(self) -> list[Operation]:
        """A rank's own work."""
        return [node for node in self.nodes.values() if isinstance(node, Operation)]

    @property
    def collectives(self) -> list[Collective]:
        """What it takes part in."""
        return [node for node in self.nodes.values() if isinstance(node, Collective)]

    def flops(self, phase: str = "") -> int:
        """Of a microbatch; of one pass's nodes, where a phase is named."""
        return sum(node.flops * node.passes for node in self.operations if phase in ("", node.phase))

    def kept_bytes(self) -> int:
        """What the layers keep for backward, each by itself."""
        return sum(node.kept_bytes for node in self.operations)
