r"""The operators of one rank's pass as a graph, from what its layers declare: children, types and sends.

    operation    a rank's own work: a layer without layers inside, or the join of a residual connection
    collective   what a layer's `sends()` names, or a message between stages, as a node of its own
    edge         an array: who made it is in the type of what each layer takes (`ArrayType.made_by`)

    forward      x -> norm1 -> qkv -> heads -> out -> [all_reduce] -> residual1 -> norm2 -> ...
    backward     the same way back: every forward node has a mirror, whose collectives are the conjugate ones

A collective stands before the work of its layer where its pair is the layer's entry (`Algebra.entry`), else behind it;
in the backward pass it is the other way round. Behind a layer that says one thing of a whole text or image (first rows,
a mean), arrays have a row for each of them. An encoder's output goes past the decoder's own rows (`graph_memory.py`);
sources and targets have as many tokens here. Nothing is computed or allocated, so that a graph of one rank out of
thousands takes as long as that of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from mpitp.backend.precision import wide_dtype
from mpitp.errors import ConfigError
from mpitp.layers.algebra import Join
from mpitp.layers.array_type import PARTIAL, REPLICATE, VARYING, ArrayType
from mpitp.layers.cross_attention import CrossAttention
from mpitp.layers.crossing import ToDecoder
from mpitp.layers.experts import Experts
from mpitp.layers.first_rows import OnFirstRows
from mpitp.layers.layer import BACKWARD, FORWARD, Layer, Send, TypedLayer, Wrapper, unwrapped
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.mixture import MixtureOfExperts, SharedExpert
from mpitp.layers.param import Param
from mpitp.layers.patches import ClassAndMean, PatchEmbedding
from mpitp.layers.recompute import Recompute
from mpitp.layers.rows import Rows
from mpitp.models.beside import gives_memory, takes_memory
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.layered import LayeredModel
from mpitp.models.stages import TO_DECODER, Chunk
from mpitp.plan.graph_memory import INPUT, memory_cost, with_memory
from mpitp.plan.kept import Sizes, kept_of, memory_bytes
from mpitp.plan.nodes import Collective, Node, Operation, RankGraph, Tensor
from mpitp.plan.operations import ELEMENTWISE, RESIDUAL, Cost, Ends, cost_of, gate_cost

INDEX_BYTES = 8


def stage_graphs(model: LayeredModel, rows: Rows, stages: Sequence[Sequence[Chunk]]) -> list[RankGraph]:
    """The graph of a microbatch of `rows` for each stage's chunks, on the rank whose (abstract) site the model lies on.
    The model has the layers of all of them.
    """
    cp, graphs = model.site.mesh["cp"], []
    own = rows.cut(cp.rank, cp.size) if cp.size > 1 else rows
    sizes = replace(Sizes.of(rows, model.site, model.config.hidden_size), texts=len(own.first_rows()))
    of_rank = _Microbatch(model, sizes, own, with_memory(model.types()))
    for chunks in stages:
        graph = RankGraph()
        for chunk in chunks:
            _ChunkGraph(of_rank, chunk, graph).add()
        graphs.append(graph)
    return graphs


def rank_graph(model: LayeredModel, rows: Rows) -> RankGraph:
    """The graph of a microbatch through the model's own chunks."""
    return stage_graphs(model, rows, [model.chunks])[0]


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """A model, its types, and what a pass through it is on this rank."""

    model: LayeredModel
    sizes: Sizes
    rows: Rows
    types: Mapping[str, TypedLayer]


Sides = dict[str, list[Node]]  # by pass


@dataclass(slots=True)
class _Chain:
    """The nodes of one place forward, in order, and how its backward mirrors them."""

    forward: list[Node]
    backward: list[Node]
    sources: tuple[str, ...]  # places whose output it takes


class _ChunkGraph:
    """Walks through a chunk's layers; a *place* is a leaf layer, a join or an end of the chunk."""

    def __init__(self, microbatch: _Microbatch, chunk: Chunk, graph: RankGraph) -> None:
        self.model, self.sizes, self.rows = microbatch.model, microbatch.sizes, microbatch.rows
        self.types, self.chunk, self.graph = microbatch.types, chunk, graph
        self.chains: dict[str, _Chain] = {}
        self.made: dict[str, str] = {}  # a name in `made_by`: the place that made it
        self.consumed: set[str] = set()

    def add(self) -> None:
        """All of the chunk's nodes go to the graph: forward, then backward."""
        first, last = self.chunk.names[0], self.chunk.names[-1]
        layers = {name: self.model.layers[name] for name in self.chunk.names}
        layers |= {"loss": self.model.loss} if self.chunk.ends_in_loss else {}
        if first != self.model.entrance:
            self._take(first)
        for name, layer in layers.items():
            self._visit(name, layer, passes=1)
        if not self.chunk.ends_in_loss:
            self._give(last)
        self._link()

    def _take(self, first: str) -> None:
        """What comes from the stage before: x, and beside it the memory, where the decoder has begun before."""
        incoming = self.types[first].incoming
        self._add_message("recv", "send", incoming, first, ())
        self.made[incoming.made_by] = f"{first} recv"
        if isinstance(self.model, EncoderDecoder) and takes_memory(self.chunk):
            forward, backward = self._message(f"{first} memory recv", ("recv", "send"), self._memory, first)
            self._add_memory(f"{first} memory", (), ([forward], [backward]))

    def _give(self, last: str) -> None:
        """What goes to the stage behind."""
        self._add_message("send", "recv", self.types[last].outgoing, last, (self.made[last],))
        if isinstance(self.model, EncoderDecoder) and gives_memory(self.chunk):
            sent = self._message(f"{last} memory send", ("send", "recv"), self._memory, last)
            self._add_chain(f"{last} memory send", _Chain([sent[0]], [sent[1]], (self.made[TO_DECODER],)))

    def _visit(self, name: str, wrapped: Layer, passes: int) -> None:
        passes = 2 if _recomputes(wrapped) else passes
        layer = unwrapped(wrapped)
        children = {key: child for key, child in layer.children().items() if not isinstance(child, Param)}
        if isinstance(layer, ToDecoder):
            self._add_memory(name, self._sources(self.types[name].incoming), ([], []))
        elif not children:
            self._add_leaf(name, layer, passes)
        else:
            self._visit_inside(name, layer, children, passes)
        if _recomputes(wrapped) and passes == 2:
            self._keep_input_alone(name)

    def _visit_inside(self, name: str, layer: Layer, children: Mapping[str, Layer], passes: int) -> None:
        joins = [join for join in (layer.algebra.forward if layer.algebra else ()) if isinstance(join, Join)]
        begun, past = len(self.chains), self._source(self.types[name].incoming)
        if isinstance(layer, OnFirstRows):
            self._take_first_rows(name, layer, passes)
        for key, child in children.items():
            inner = f"{name}.{key}"
            if joins and key in joins[0].before:
                made_by = self.types[inner].incoming.made_by
                past = self._past(name, joins[0], children) or past
                past = self._add_join(f"{name}.{joins.pop(0).name}", inner, (self.made[made_by], past), passes)
                self.made[made_by] = past
            self._visit(inner, child, passes)
        own = list(self.chains)[begun:]
        result = own[-1]
        if joins:
            branches = [place for place in own if place not in self.consumed]
            result = self._add_join(f"{name}.{joins[0].name}", name, (*branches, past), passes, behind=True)
        if isinstance(layer, CrossAttention):
            self._use(f"{name}.heads", f"{name}.kv")
            if not self.sizes.is_gathered:  # the memory is kept where it is made
                self._keep(f"{name}.kv", 0)
        if isinstance(layer, MixtureOfExperts):
            result = self._join_mixture(name, layer, passes)
        if isinstance(layer, SharedExpert):
            tensor = self._tensor(self.types[name].outgoing)
            size = tensor.rows * tensor.width
            cost = gate_cost(Ends(self.sizes.rows, size, size, self.sizes.item, self.sizes.wide))
            result = self._add_own(f"{name}.gate", tensor, (result, past), cost, passes)
        self.made[name] = result

    def _past(self, name: str, join: Join, children: Mapping[str, Layer]) -> str:
        """What goes past a branch that a join names; "": what the block was given, or the sum before."""
        beside = next((key for key in join.past if key in children), None)
        return "" if beside is None else self._source(self.types[f"{name}.{beside}"].incoming)

    def _take_first_rows(self, name: str, layer: OnFirstRows, passes: int) -> None:
        """One row of each text goes on, from all ranks where each has its own."""
        typed = self.types[name]
        taken, self.sizes = self._tensor(typed.incoming), self.sizes.of_texts
        given = replace(taken, rows=self.sizes.rows)
        cost = Cost(ELEMENTWISE, moved=(2 * given.num_bytes, given.num_bytes + taken.num_bytes))
        own = [
            _operation(f"{name}.first rows", phase, cost, out, self.sizes.texts * INDEX_BYTES)
            for phase, out in ((FORWARD, given), (BACKWARD, taken))
        ]
        _, behind = self._sends(f"{name}.first rows", layer, (given, given))
        forward = [replace(node, passes=passes) for node in (own[0], *behind[FORWARD])]
        self._add_chain(f"{name}.first rows", _Chain(forward, [own[1]], self._sources(typed.incoming)))
        self.made[typed.incoming.made_by] = f"{name}.first rows"

    def _join_mixture(self, name: str, layer: MixtureOfExperts, passes: int) -> str:
        """Experts wait for the router too; what they have made is added to what the shared expert has."""
        router, experts = f"{name}.router", f"{name}.experts"
        self._use(experts, router)
        if layer.shared is None:
            return experts
        return self._add_join(f"{name}.sum", name, (experts, self.made[f"{name}.shared"]), passes, behind=True)

    def _add_leaf(self, name: str, layer: Layer, passes: int) -> None:
        typed = self.types[name]
        taken = self._pixels(layer, typed) if isinstance(layer, PatchEmbedding) else self._tensor(typed.incoming)
        if isinstance(layer, ClassAndMean):
            self.sizes = replace(self.sizes.of_texts, hidden=2 * self.sizes.hidden)
        given = self._tensor(typed.outgoing)
        if isinstance(layer, VocabParallelCrossEntropy):
            given = replace(given, width=1)
        kept = 0 if passes == 2 else self._kept(layer, taken)
        rows = taken.rows if isinstance(layer, PatchEmbedding) else self.sizes.rows
        ends = Ends(rows, taken.rows * taken.width, given.rows * given.width, self.sizes.item, self.sizes.wide)
        cost = cost_of(layer, ends, self.rows)
        own = [_operation(name, phase, cost, out, kept) for phase, out in ((FORWARD, given), (BACKWARD, taken))]
        before, behind = self._sends(name, layer, (self._sent(layer, taken), given))
        of_pass = [[*before[node.phase], self._summand(node, behind[node.phase]), *behind[node.phase]] for node in own]
        forward = [replace(node, passes=passes) for node in of_pass[0]]
        self._add_chain(name, _Chain(forward, of_pass[1], self._sources(typed.incoming)))
        self.made[name] = name

    def _summand(self, node: Operation, behind: Sequence[Node]) -> Operation:
        """What is summed right behind it along tp as one array of all rows is partial until then."""
        first = behind[0] if behind else None
        if not isinstance(first, Collective) or first.axis != "tp" or node.output is None:
            return node
        summand = replace(node.output, rows=self.sizes.rows).along("tp", PARTIAL)
        return replace(node, output=summand) if first.given_bytes >= summand.num_bytes else node

    def _add_join(self, name: str, like: str, sources: tuple[str, ...], passes: int, *, behind: bool = False) -> str:
        typed = self.types[like]
        tensor = self._tensor(typed.outgoing if behind else typed.incoming)
        cost = Cost(RESIDUAL, moved=((len(sources) + 1) * tensor.num_bytes, 3 * tensor.num_bytes))
        return self._add_own(name, tensor, sources, cost, passes)

    def _add_own(self, name: str, tensor: Tensor, sources: tuple[str, ...], cost: Cost, passes: int) -> str:
        """What a layer that is made of others does by itself."""
        forward: list[Node] = [replace(_operation(name, FORWARD, cost, tensor, 0), passes=passes)]
        self._add_chain(name, _Chain(forward, [_operation(name, BACKWARD, cost, tensor, 0)], sources))
        return name

    def _add_message(self, op: str, back: str, kind: ArrayType, layer: str, sources: tuple[str, ...]) -> None:
        place = f"{layer} {op}"
        sent = self._message(place, (op, back), self._tensor(kind), layer)
        self._add_chain(place, _Chain([sent[0]], [sent[1]], sources))

    @staticmethod
    def _message(place: str, ops: tuple[str, str], tensor: Tensor, layer: str) -> tuple[Node, Node]:
        """Forward and backward."""
        forward, backward = (
            Collective(f"{place} {phase}", layer, phase, (), tensor, 1, op, "pp", 2, 1, Fraction(tensor.num_bytes))
            for phase, op in zip((FORWARD, BACKWARD), ops, strict=True)
        )
        return forward, backward

    @property
    def _memory(self) -> Tensor:
        return self._tensor(self.model.site.shard_type.of_layer(TO_DECODER))

    def _add_memory(self, place: str, sources: tuple[str, ...], messages: tuple[list[Node], list[Node]]) -> None:
        """Where the chunk has the memory from: forward it is kept, backward its gradients are added up. `messages`:
        with which it came, and its gradient goes.
        """
        tensor = self._memory
        cost = memory_cost(self.chunk, [self.model.layers[name] for name in self.chunk.names], tensor)
        own = [_operation(place, phase, cost, tensor, memory_bytes(self.sizes)) for phase in (FORWARD, BACKWARD)]
        self._add_chain(place, _Chain([*messages[0], own[0]], [own[1], *messages[1]], sources))
        self.made[TO_DECODER] = place

    def _use(self, place: str, source: str) -> None:
        """A place takes what another has made, too."""
        self.chains[place].sources += (source,)
        self.consumed.add(source)

    def _add_chain(self, place: str, chain: _Chain) -> None:
        self.chains[place] = chain
        self.consumed |= set(chain.sources)

    def _source(self, incoming: ArrayType) -> str:
        return self.made.get(incoming.made_by, "")

    def _sources(self, incoming: ArrayType) -> tuple[str, ...]:
        source = self._source(incoming)
        return (source,) if source else ()

    def _tensor(self, kind: ArrayType) -> Tensor:
        """Rows are cut where a rank of tp has other ones and whole columns."""
        is_shard = self.model.site.sequence_parallel and kind.along("tp") == VARYING and not kind.columns
        width = sum(len(cut.held) for _, cut in kind.columns) if kind.columns else self.sizes.hidden
        if kind.made_by == INPUT:
            return Tensor(self.sizes.rows, 1, INDEX_BYTES, kind.letters)
        return Tensor(self.sizes.shard if is_shard else self.sizes.rows, width, self.sizes.item, kind.letters)

    def _pixels(self, layer: PatchEmbedding, typed: TypedLayer) -> Tensor:
        """Of all patches; class tokens have none."""
        width = layer.weight.data[0].size
        return Tensor(int(np.count_nonzero(self.rows.positions())), width, self.sizes.item, typed.incoming.letters)

    def _sent(self, layer: Layer, taken: Tensor) -> Tensor:
        """What a forward pass's sends count the rows of."""
        return replace(taken, rows=self.sizes.rows) if isinstance(layer, PatchEmbedding | ClassAndMean) else taken

    def _kept(self, layer: Layer, taken: Tensor) -> int:
        if isinstance(layer, VocabParallelCrossEntropy):
            return self.sizes.rows * (taken.width * self.sizes.wide + self.sizes.wide + INDEX_BYTES)
        try:
            return kept_of(layer, self.sizes)
        except ConfigError:  # an activation between linears: its input
            return taken.num_bytes

    def _keep_input_alone(self, name: str) -> None:
        """What a layer that recomputes keeps: its input, with the first node inside it."""
        inside = next(place for place in self.chains if place == name or place.startswith(f"{name}."))
        self._keep(inside, self._tensor(self.types[name].incoming).num_bytes)

    def _keep(self, place: str, kept: int) -> None:
        chain = self.chains[place]
        chain.forward = [
            replace(node, kept_bytes=kept) if isinstance(node, Operation) else node for node in chain.forward
        ]

    def _sends(self, name: str, layer: Layer, ends: tuple[Tensor, Tensor]) -> tuple[Sides, Sides]:
        """The layer's collectives before and behind its work, by pass."""
        before: Sides = {FORWARD: [], BACKWARD: []}
        behind: Sides = {FORWARD: [], BACKWARD: []}
        is_entry = bool(layer.algebra and layer.algebra.entry)
        is_exit = bool(layer.algebra and layer.algebra.exit)
        sizes = self.model.site.mesh.sizes
        for send in (each for each in layer.sends() if sizes[each.axis] > 1):
            is_forward = send.phase == FORWARD
            early = (is_entry or send.axis == "cp") if is_forward else is_exit and not is_entry
            if isinstance(layer, PatchEmbedding):  # dy's columns come together before the product
                early = not is_forward
            if isinstance(layer, Experts):  # rows are gathered and sent to them before, and summed behind
                early = send.op in ("all_gather", "all_to_all")
            number = len(before[send.phase] + behind[send.phase])
            made = self._collective(name, send, ends if is_forward else ends[::-1], number)
            made = replace(made, is_hidden=is_entry and not is_forward)
            (before if early else behind)[send.phase].append(made)
        return before, behind

    def _collective(self, name: str, send: Send, ends: tuple[Tensor, Tensor], number: int) -> Collective:
        """`ends`: what goes into this pass of the layer, and what comes out. `given_bytes` as the ledger counts them:
        by the rows that go in, times the send's width.
        """
        item = wide_dtype(self.model.dtype).itemsize if send.is_wide else self.sizes.item
        item = INDEX_BYTES if send.is_index else item
        ranks = self.model.site.mesh.sizes[send.axis]
        size = Fraction(send.calls * (ends[0].rows * send.width * item + send.fixed_bytes))
        size = size * send.summands / ranks if send.summands else size
        out = ends[1]
        if send.op == "all_gather":
            out = replace(out, rows=self.sizes.rows, width=send.width).along(send.axis, REPLICATE)
        label = f"{name} {send.op} {send.phase}" + (f" {number}" if number else "")
        return Collective(label, name, send.phase, (), out, 1, send.op, send.axis, ranks, send.calls, size)

    def _link(self) -> None:
        """Put the chains' nodes into the graph with their inputs: forward in order, then backward in reverse."""
        users: dict[str, list[str]] = {place: [] for place in self.chains}
        for place, chain in self.chains.items():
            for source in chain.sources:
                users[source].append(place)
        for chain in self.chains.values():
            self._put(chain.forward, [self.chains[source].forward[-1].name for source in chain.sources])
        for place in reversed(self.chains):
            chain = self.chains[place]
            self._put(chain.backward, [self.chains[user].backward[-1].name for user in users[place]])

    def _put(self, nodes: Sequence[Node], sources: Iterable[str]) -> None:
        inputs = tuple(dict.fromkeys(sources))
        for node in nodes:
            assert node.name not in self.graph.nodes, f"two nodes called {node.name}"
            self.graph.nodes[node.name] = replace(node, inputs=inputs)
            inputs = (node.name,)


def _operation(name: str, phase: str, cost: Cost, out: Tensor, kept: int) -> Operation:
    """Forward and backward of a place bear its name; backward's is marked."""
    turn = phase == BACKWARD
    label = f"{name} backward" if turn else name
    kept = 0 if turn else kept
    return Operation(label, name, phase, (), out, 1, cost.kind, cost.flops[turn], cost.moved[turn], kept, cost.shape)


def _recomputes(layer: Layer) -> bool:
    while isinstance(layer, Wrapper):
        if isinstance(layer, Recompute):
            return True
        layer = layer.inner
    return False
