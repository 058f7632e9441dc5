r"""The graph of a whole training step on a mesh without processes: every stage's microbatch, and what a step adds.

Of each stage one rank stands for all: the first along every axis but pp. Ranks along tp differ by a unit at most (the
first has one more), ranks along dp, ep and cp by the rows that they have. Behind the microbatches come, on every rank,

    sums of gradients    ZeRO 0: all_reduce of P w;  1: reduce_scatter of P w and all_gather of its rows of P s;  2: the
                         same with a reduce_scatter a microbatch;  3: about two all_gathers and a reduce_scatter each
    tied tables          their gradient between each two of the stages that hold them, a message each way
    sums along tp        of gradients that sequence parallelism leaves partial; ZeRO 2: a microbatch
    gradient norm        all_reduce of 8 bytes for every block of every parameter part
    agreement            broadcast of 16 bytes
    optimizer            own rows of weights, gradients and moments, read and written

with P elements of parameters on a rank, w bytes of one in which gradients are summed, s bytes of a weight. A sum's
buckets are one node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from mpitp.backend.precision import is_half
from mpitp.comm.mesh import AXES, Mesh, abstract_mesh
from mpitp.config import RunConfig
from mpitp.layers.param import Param
from mpitp.layers.partition import piece_of
from mpitp.layers.shards import data_axes
from mpitp.layers.site import make_site
from mpitp.models.any_config import AnyConfig
from mpitp.models.layered import LayeredModel, is_within
from mpitp.models.stages import Chunk, costs_of, names_of_parts
from mpitp.optim.grad_norm import slots_of
from mpitp.plan.graph import stage_graphs
from mpitp.plan.graph_models import GraphSource, layer_costs, rows_of, source_of, whole_model
from mpitp.plan.nodes import UPDATE, Collective, Node, Operation, RankGraph
from mpitp.train.deal import Deal
from mpitp.train.setup import mesh_sizes, num_microbatches

OPTIMIZER = "optimizer"
AGREEMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class StageGraph:
    """One stage: the graph of a microbatch on its first rank, and on the last one along tp (whose shards are the
    smallest); what a step does once; the names of its layers, chunk by chunk.
    """

    stage: int
    chunks: tuple[tuple[str, ...], ...]
    first: RankGraph
    last: RankGraph
    update: tuple[Node, ...]
    microbatches: int
    params: int  # elements on the first rank

    def flops(self) -> int:
        """Of a step, on the first rank."""
        return self.first.flops() * self.microbatches

    def given_bytes(self, axis: str = "") -> int:
        """What the first rank hands to collectives in a step, along an axis or along all."""
        within = sum(_given(node, axis) * node.passes for node in self.first.collectives)
        return int(within * self.microbatches + sum(_given(node, axis) for node in self.update))


@dataclass(frozen=True, slots=True)
class StepGraph:
    """All stages of a step, and what they were made of."""

    model_type: str
    dtype: str
    sizes: dict[str, int]  # ranks along each axis
    tokens: int  # of a microbatch
    schedule: str
    stages: tuple[StageGraph, ...]

    @property
    def ranks(self) -> int:
        """Of the job."""
        return prod(self.sizes.values())

    def stage_of(self, layer: str) -> StageGraph | None:
        """The stage that has a layer of this name at the top of the model."""
        return next((stage for stage in self.stages if any(layer in names for names in stage.chunks)), None)


def _given(node: Node, axis: str) -> Fraction:
    return node.given_bytes if isinstance(node, Collective) and axis in ("", node.axis) else Fraction(0)


def step_graph(config: RunConfig, config_of_model: AnyConfig, ranks: int) -> StepGraph:
    """The graph of a step of a run on so many ranks. Raises ConfigError for a run that can't be laid on them.

    The layers of all stages are made once, for the first and for the last rank along tp, whatever the number of ranks.
    """
    sizes, source = abstract_mesh(mesh_sizes(config), 0, ranks).sizes, source_of(config, config_of_model)
    first, last = (whole_model(config, source, sizes, rank) for rank in (0, sizes["tp"] - 1))
    chunks, rows = stage_chunks(source, first, sizes["pp"]), rows_of(config, config_of_model)
    graphs = zip(stage_graphs(first, rows, chunks), stage_graphs(last, rows, chunks), strict=True)
    count = len(Deal(0, sizes["dp"] * sizes["ep"]).of(num_microbatches(config)))
    slots = _norm_slots(source, first.site.num_blocks or sizes["tp"])
    update = _Update(first, config.optim.zero, count, ranks, slots, sizes["pp"] > 1)
    stages, holders = [], holders_of_tied(first, [{name for chunk in own for name in chunk.names} for own in chunks])
    for number, (own, both) in enumerate(zip(chunks, graphs, strict=True)):
        names = tuple(chunk.names for chunk in own)
        params = _params_of(first, names)
        tied = {name: len(others) - 1 for name, others in holders.items() if number in others and len(others) > 1}
        nodes = tuple(_chained(update.nodes(params, tied)))
        stages.append(StageGraph(number, names, *both, nodes, count, sum(param.data.size for param in params)))
    schedule = config.mesh.schedule if sizes["pp"] > 1 else ""
    return StepGraph(config_of_model.model_type, config.model.dtype, sizes, rows.num_tokens, schedule, tuple(stages))


def _norm_slots(source: GraphSource, blocks: int) -> int:
    """Numbers in the vector of the gradient norm, for dims cut into `blocks` blocks."""
    site = make_site(abstract_mesh({"tp": 1}), invariant_blocks=blocks)
    return slots_of(source.abstract(site).named_params())


def stage_chunks(source: GraphSource, model: LayeredModel, stages: int) -> list[list[Chunk]]:
    """The chunks of each stage, out of a model with all layers."""
    if stages == 1:
        return [list(model.chunks)]
    types, names = model.types(), list(model.layers)
    blocks = source.cutting.deal(costs_of(layer_costs(source.config, model.layers)), stages)
    parts = [Chunk(own, types[own[0]].incoming, names[-1] in own) for own in names_of_parts(names, blocks)]
    return [parts[stage::stages] for stage in range(stages)]


def _params_of(model: LayeredModel, chunks: Sequence[Sequence[str]]) -> list[Param]:
    """A stage's parameters, each once."""
    found = [param for names in chunks for name in names for param in model.layers[name].params().values()]
    return list({id(param): param for param in found}.values())


def holders_of_tied(model: LayeredModel, stages: Sequence[Collection[str]]) -> dict[str, list[int]]:
    """Of each parameter that several layers share, the stages, of layers of these names, that hold it."""
    uses: dict[str, list[str]] = {}
    for second, first in model.tied.items():
        uses.setdefault(first, [first]).append(second)
    return {
        first: [number for number, own in enumerate(stages) if any(is_within(name, own) for name in names)]
        for first, names in uses.items()
    }


@dataclass(frozen=True, slots=True)
class _Update:
    """What a step adds to its microbatches on a rank."""

    model: LayeredModel
    zero: int
    microbatches: int
    ranks: int
    slots: int  # of the gradient norm
    has_stages: bool

    @property
    def rounds(self) -> int:
        """Of sums of gradients in a step: stages do all when all is done."""
        return self.microbatches if self.zero == 2 and not self.has_stages else 1

    @property
    def mesh(self) -> Mesh:
        """Without its stages."""
        return self.model.site.mesh

    def nodes(self, params: Sequence[Param], tied: Mapping[str, int]) -> Iterator[Node]:
        """In order; what is done each microbatch counts as often. `tied`: on how many other stages a parameter is."""
        if self.ranks > 1:
            yield from self._tied_sums(tied)
            yield from self._gradient_sums(params)
            yield _once("gradient norm", "all_reduce sum", "+".join(AXES), self.ranks, 8 * self.slots)
            yield _once("agreement", "broadcast", "+".join(AXES), self.ranks, AGREEMENT_BYTES)
        yield self._optimizer(params)

    def _gradient_sums(self, params: Sequence[Param]) -> Iterator[Node]:
        mesh = self.mesh
        kinds: dict[tuple[str, ...], list[Param]] = {}  # experts that are dealt over ep are summed along fewer axes
        for param in params:
            axes = tuple(axis for axis in data_axes(param.placement) if mesh.sizes[axis] > 1)
            if axes:
                kinds.setdefault(axes, []).append(param)
        most = max(kinds, key=len, default=())
        for axes, dealt in kinds.items():
            yield from self._dealt_sums("" if axes == most else " of experts", axes, dealt)
        partial = [param for param in params if "tp" in param.placement.partial and mesh.sizes["tp"] > 1]
        if partial:
            size = sum(self._kept(param) * param.grad_dtype.itemsize for param in partial)
            rounds = self.rounds
            yield _once(
                "gradients of whole parameters", "all_reduce sum", "tp", mesh.sizes["tp"], size * rounds, rounds
            )

    def _dealt_sums(self, whose: str, axes: tuple[str, ...], dealt: Sequence[Param]) -> Iterator[Node]:
        """Along the axes of data that these parameters have copies along."""
        zero, ranks, axis = self.zero, self.mesh.along(*axes).size, "+".join(axes)
        grads = sum(param.data.size * param.grad_dtype.itemsize for param in dealt)
        weights = sum(self._own(param) * param.data.dtype.itemsize for param in dealt)
        if zero == 0:
            yield _once(f"gradients{whose}", "all_reduce sum", axis, ranks, grads, is_hidden=True)
            return
        rounds = self.microbatches if zero == 3 else self.rounds
        yield _once(f"gradients{whose}", "reduce_scatter", axis, ranks, grads * rounds, rounds, is_hidden=True)
        gathers = 2 * self.microbatches if zero == 3 else 1
        yield _once(f"weights{whose}", "all_gather", axis, ranks, weights * gathers, gathers, is_hidden=zero == 3)

    def _tied_sums(self, tied: Mapping[str, int]) -> Iterator[Node]:
        """Each of the stages that have a parameter sends its summand to all others of them."""
        params = dict(self.model.named_params())
        for name, others in tied.items():
            size = params[name].data.size * params[name].grad_dtype.itemsize
            yield _once(f"gradient of {name}", "send", "pp", 2, others * size, others)

    def _optimizer(self, params: Sequence[Param]) -> Node:
        """AdamW reads weight, gradient and two moments, and writes all but the gradient; with masters of 16-bit weights
        these are read and written too.
        """
        wide = 5 + 2 * is_half(self.model.dtype)
        moved = sum(self._kept(p) * (2 * p.data.dtype.itemsize + wide * p.grad_dtype.itemsize) for p in params)
        return Operation(OPTIMIZER, OPTIMIZER, UPDATE, (), None, 1, OPTIMIZER, 0, moved)

    def _kept(self, param: Param) -> int:
        """Elements that this rank updates."""
        return self._own(param) if self.zero else param.data.size

    def _own(self, param: Param) -> int:
        """Elements that this rank of the axes of data keeps under ZeRO."""
        group, rows = self.mesh.along(*data_axes(param.placement)), len(param.data)
        return len(piece_of(rows, group.rank, group.size)) * (param.data.size // max(rows, 1))


def _once(name: str, op: str, axis: str, ranks: int, size: int, calls: int = 1, *, is_hidden: bool = False) -> Node:
    return Collective(f"{name} {op}", name, UPDATE, (), None, 1, op, axis, ranks, calls, Fraction(size), is_hidden)


def _chained(nodes: Iterator[Node]) -> Iterator[Node]:
    before: tuple[str, ...] = ()
    for node in nodes:
        yield replace(node, inputs=before)
        before = (node.name,)
