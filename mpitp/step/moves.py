"""What goes between ranks beside the collectives of tensor parallelism, in words.

Messages between stages (pp) and around a ring (cp), rows exchanged for heads (cp), sums of gradients over replicas
(dp, cp) and, where norms work on token shards, over tp. A message is two operations: its send, and its receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpitp.comm.mesh import Mesh
from mpitp.comm.observed import Call, ObservedGroup
from mpitp.layers.array_type import PARTIAL, VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.layers.ring_keys import TAG_GRADIENTS, TAG_KEYS
from mpitp.models.beside import Memory
from mpitp.models.layered import LayeredModel
from mpitp.pipeline.actions import Grid, carried_by
from mpitp.pipeline.runner import TIED_TAG
from mpitp.step.film import Message, Telling

SUMS = ("all_reduce", "reduce_scatter", "all_reduce_in_order")  # of gradients, outside of layers
GRADIENTS = "gradients"  # the place of what is done when backward is
_NAMES = {TAG_KEYS: "kv", TAG_GRADIENTS: "dkv"}  # of what goes round in a layer
MESSAGE, EXCHANGE = "message", "exchange"  # what they are to the tour
_RING, _HEADS = "mpitp.layers.ring_keys:RingKeys.attend", "mpitp.layers.heads_keys:HeadsKeys.attend"
_STAGES, _BUCKETS = "mpitp.pipeline.runner:PipelineRunner.__call__", "mpitp.optim.reduction:InBuckets.layer_done"
_IN_ORDER = "mpitp.optim.reduction:InOrder.batch_done"
_BACK_AND_FORTH = "all-to-all forward, all-to-all backward"
_PAIRS = ("x", "dx", "m", "dm", "counts", "dcounts")  # there and back between stages
_TOLD = {
    "x": ("x goes on to the next stage", "started, not waited for; dx comes back on this way"),
    "dx": ("dx goes back to the stage before", "on the way on which x came"),
    "kv": ("k, v go round: from rank r to rank r + 1 of cp", "the queries here meet the keys that come"),
    "dkv": ("dk, dv follow their keys to rank r + 1 of cp", "each rank adds the part of its queries"),
    "m": ("memory goes on beside x", "the encoder's output, which every later block of the decoder reads"),
    "dm": ("dmemory goes back beside dx", "the sum of what the blocks of later stages have left for the memory"),
    "counts": ("the routers' counts go on beside x", "the auxiliary losses are means over the blocks of all stages"),
    "dcounts": ("what all routers have counted goes back beside dx", "with it what the auxiliary losses weigh"),
    "dE": ("dE = sum over the stages that have E", "the tied table lies on both"),
    "dB": ("dB = sum over the stages that have B", "the table of distances lies on both"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moves:
    """Of one rank of a mesh. `batch`: the type of what goes into the model; `chunks`: parts of it that a stage has;
    `tied`: of each other stage, the parameters that lie on it too, in the order of their sums; `beside`: what goes from
    stage to stage behind an activation, "" for nothing.
    """

    mesh: Mesh
    batch: ArrayType
    sequence_parallel: bool
    chunks: int = 1
    tied: Mapping[int, Sequence[str]] = field(default_factory=dict)
    beside: str = ""

    @classmethod
    def of(cls, model: LayeredModel) -> Moves:
        """Of the model of this rank."""
        site, firsts = model.site, dict.fromkeys(model.tied.values())
        own = site.mesh.coordinates["pp"]
        holders = {first: model.stages_with(first) for first in firsts} if model.stage_layers else {}
        tied = {
            stage: [first for first, stages in holders.items() if {stage, own} <= set(stages)]
            for stage in range(site.mesh.sizes["pp"])
        }
        beside = "m" if isinstance(model.beside, Memory) else "counts"
        return cls(site.mesh, site.batch_type, site.sequence_parallel, len(model.chunks), tied, beside)

    @property
    def whole(self) -> ArrayType:
        """A gradient as the optimizer takes it: this rank's own along tp, the same along all other axes."""
        return ArrayType.of(dict(self.batch.letters), tp=VARYING)

    def kind_of(self, name: str) -> ArrayType:
        """Of what is sent between stages."""
        if name in ("dE", "dB"):  # rows of a table, summed over the stages before it is over the replicas
            return ArrayType(
                tuple((axis, PARTIAL if letter == VARYING else VARYING) for axis, letter in self.batch.letters)
            )
        return self.batch.changed("tp", VARYING) if self.sequence_parallel else self.batch

    def phase_of(self, call: Call) -> str:
        """The pass that a message between stages is of."""
        tag = _tag_of(call)
        return FORWARD if tag < TIED_TAG and not carried_by(tag, self.chunks).is_gradient else BACKWARD

    def microbatch_of(self, call: Call, now: int) -> int:
        """The microbatch that a message between stages is of; of what is of none, the one at hand, `now`."""
        tag = _tag_of(call)
        return carried_by(tag, self.chunks).microbatch if tag < TIED_TAG else now

    def axis_of(self, group: ObservedGroup) -> str:
        """Along which the ranks of a group differ; several as "dp+cp"."""
        return next(("+".join(axes) for axes, each in self.mesh.groups() if each is group and axes), "tp")

    def message(self, call: Call, group: ObservedGroup) -> Message:
        """The ends of a message by their numbers in the job, and what tells it from others between the same two."""
        way, peer, *tag = call.detail.split()
        rank, other = (n if group.members is None else group.members[n] for n in (group.rank, int(peer)))
        ends = (rank, other) if way == "to" else (other, rank)
        return Message(*ends, " ".join((group.name, *tag)))

    def name_of(self, call: Call, phase: str, layer: str, number: int) -> str:
        """How the equations call what a message carries, the one of this number of those with its tag. `layer`: in
        which it happens, "" between stages, where something may come behind an activation.
        """
        tag = _tag_of(call)
        if layer:
            return _NAMES.get(tag, "x")
        if tag == TIED_TAG:
            shared = self.tied.get(int(call.detail.split()[1]), ())
            return "dB" if number < len(shared) and not shared[number].endswith("embedding.weight") else "dE"
        name = self.beside if number else "x"
        return name if phase == FORWARD else f"d{name}"

    def message_telling(self, call: Call, name: str, layer: str, phase: str) -> Telling:
        """A send or a receive. `layer`: in which it happens, "" between stages."""
        equation, note = _TOLD[name]
        title = f"{call.op} of {name}"
        there = name.removeprefix("d")
        conjugate = f"send of {there} forward, send of d{there} the other way backward" if name in _PAIRS else ""
        code = _RING if name in ("kv", "dkv") else _STAGES
        return Telling(layer or self._ends(call), phase, title, equation, note, conjugate, call.op, MESSAGE, code)

    def _ends(self, call: Call) -> str:
        """The two stages between which a message goes: "stages 0-1"; where stages have several parts of the model, the
        parts: "parts 1-2".
        """
        peer, own, tag = int(call.detail.split()[1]), self.mesh.coordinates["pp"], _tag_of(call)
        if self.chunks == 1 or tag >= TIED_TAG:
            return f"stages {min(peer, own)}-{max(peer, own)}"
        told, grid = carried_by(tag, self.chunks), Grid(self.mesh.sizes["pp"], self.chunks)
        part = grid.part(peer if call.op == "send" else own, told.receiving_chunk)
        first = part if told.is_gradient else part - 1
        return f"parts {first}-{first + 1}"

    def exchange_telling(self, layer: str, phase: str, kind: str, count: int) -> Telling:
        """Rows for heads, or heads for rows: the two all-to-alls of a pass."""
        to_heads = count % 2 == 0
        what = ("q, k, v" if phase == FORWARD else "do") if to_heads else ("o" if phase == FORWARD else "dq, dk, dv")
        way = "own rows of all heads -> all rows of own heads" if to_heads else "all rows of own heads -> own rows"
        return Telling(layer, phase, kind, f"{what}: {way}", "", _BACK_AND_FORTH, kind, EXCHANGE, _HEADS)

    def sum_telling(self, kind: str, axis: str, phase: str) -> Telling:
        """A bucket of gradients."""
        over = axis.replace("+", " and ")
        note = (
            "a bucket: the gradients of several parameters, one after the other; it starts as soon as the last is there"
        )
        pair = "weights alike on all replicas forward, their gradients summed backward"
        told = f"dW = sum over {over} of dW"
        if kind == "reduce_scatter":
            told, note = f"{told}, of which each keeps its rows", f"{note}; each updates its rows only"
        return Telling(GRADIENTS, phase, kind, told, note, pair, kind, GRADIENTS, _BUCKETS)

    def in_order_telling(self, name: str, kind: str, axis: str) -> Telling:
        """The gradient of the parameter `name` in the invariant mode, one round of microbatches."""
        note = (
            "a parameter and a round of microbatches: rank 0 goes on from the sum so far, so that gradients are added "
            "in the order of their microbatches, whoever has them"
        )
        pair = "weights alike on all replicas forward, their gradients summed backward"
        over, place = axis.replace("+", " and "), f"{GRADIENTS}.{name}"
        told = f"dW = ((dW so far + dW of rank 0) + dW of rank 1) + ... along {over}"
        return Telling(place, BACKWARD, kind, told, note, pair, kind, GRADIENTS, _IN_ORDER)


def _tag_of(call: Call) -> int:
    return int(call.detail.partition(" tag ")[2] or 0)
