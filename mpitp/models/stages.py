"""How a model is cut into the parts of a pipeline, and the layers that one rank of it holds.

    part 0        embedding, positions, the first blocks
    part i        the blocks that follow
    last part     the last blocks, final norm, head and loss

A stage (a rank along pp) holds one part, or several *chunks*: stage s of p has the parts s, p + s, 2 p + s, ... The
blocks are dealt so that the dearest part is as cheap as can be (a pipeline goes at the pace of its slowest stage), and
the others as even as can be; embedding and head count. The user may deal them otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from mpitp.errors import ConfigError
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer, TypedLayer
from mpitp.layers.param import Param
from mpitp.layers.site import Site

TO_DECODER = "to decoder"  # the layer that turns from an encoder to a decoder, where a model has both
_BLOCK = re.compile(r"(encoder\.)?blocks\.\d+$")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rank's chunks: the names of the layers of each, and the type of what it takes. `stages`: the names of every
    stage's layers; (): there is one.
    """

    chunks: Sequence[tuple[tuple[str, ...], ArrayType]] = ()
    stages: Sequence[tuple[str, ...]] = ()

    def made_of(self, names: Iterable[str], incoming: ArrayType, last: str) -> list[Chunk]:
        """The chunks; all layers in one where none are chosen. `last`: whose output the loss is of."""
        return [Chunk(own, given, last in own) for own, given in self.chunks or [(tuple(names), incoming)]]

    def has(self, layer: str) -> bool:
        """Whether the rank has the layer; without chunks it has all."""
        return not self.chunks or any(layer in names for names, _ in self.chunks)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a model is to be cut: `chunks` parts a stage; `blocks`: of each part, in forward order (none: by cost)."""

    chunks: int = 1
    blocks: tuple[int, ...] = ()

    def deal(self, costs: Costs, stages: int, weights: Sequence[float] = ()) -> tuple[range, ...]:
        """The blocks of each part. `weights`: of the stages, by which costs are dealt (none: evenly).

        Raises ConfigError for what can't be dealt so.
        """
        count, parts = len(costs.blocks), stages * self.chunks
        if self.blocks:
            self._check(count, stages)
            if weights:
                raise ConfigError(
                    f"mesh.stages = {list(self.blocks)} says which blocks each part has, and so does mesh.shares along "
                    f"pp = {list(weights)}; leave out one of the two"
                )
        elif parts > count:
            raise ConfigError(_too_many(stages, self.chunks, count))
        counts = self.blocks or deal_by_cost(costs, parts, weights)
        stops = list(accumulate(counts))
        return tuple(range(stop - own, stop) for own, stop in zip(counts, stops, strict=True))

    def _check(self, count: int, stages: int) -> None:
        """Refuse a list that doesn't fit. The ends may go without blocks: they have embedding and head."""
        listed, parts = list(self.blocks), stages * self.chunks
        each = f"mesh.pp = {stages}" + (f" x mesh.chunks = {self.chunks}" if self.chunks > 1 else "")
        if len(listed) != parts:
            raise ConfigError(
                f"mesh.stages = {listed} names the blocks of {len(listed)} parts, but {each} makes {parts}; name the "
                "blocks of each part in order, or leave mesh.stages out: they are dealt by cost then"
            )
        if sum(listed) != count or min(listed[1:-1], default=1) < 1:
            even = [count * (part + 1) // parts - count * part // parts for part in range(parts)]
            raise ConfigError(
                f"mesh.stages = {listed}: {' + '.join(map(str, listed))} = {sum(listed)} blocks, the model has {count} "
                f"(only the first and last part may have none); use such as {even}, or leave mesh.stages out"
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive layers that a rank runs in one go, by their names in the model, and the type of what they take."""

    names: tuple[str, ...]
    incoming: ArrayType
    ends_in_loss: bool = True


@dataclass(frozen=True, slots=True)
class Costs:
    """What the pieces that are never cut cost, in any unit: all before the blocks, each block, all behind them."""

    first: float
    blocks: tuple[float, ...]
    last: float


def deal_by_cost(costs: Costs, parts: int, weights: Sequence[float] = ()) -> tuple[int, ...]:
    """How many blocks each part gets: at least one each, except that the last may have the head alone.

    Of all ways, those whose dearest part is the cheapest; among these the one with the smallest sum of squares. By
    dynamic programming over (parts dealt, blocks dealt): O(parts blocks^2). A part on a stage of weight w costs 1 / w
    of what it does (the stages take turns: part i is on stage i mod stages).
    """
    sums = [0.0, *accumulate(costs.blocks)]

    def cost(part: int, start: int, stop: int) -> float:
        whole = sums[stop] - sums[start] + costs.first * (part == 0) + costs.last * (part == parts - 1)
        return whole / weights[part % len(weights)] if weights else whole

    limit, _ = _best(parts, len(costs.blocks), lambda before, part, *blocks: max(before, cost(part, *blocks)))

    def squares(before: float, part: int, start: int, stop: int) -> float:
        own = cost(part, start, stop)
        return before + own**2 if own <= limit * (1 + 1e-9) else float("inf")

    return _best(parts, len(costs.blocks), squares)[1]


def _best(parts: int, count: int, add: Callable[[float, int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The smallest value of dealing `count` blocks to `parts`, and how many each gets.

    `add(value of the parts before, part, its first block, the block after its last)` is the value with that part.
    """

    @cache
    def best(part: int, stop: int) -> tuple[float, tuple[int, ...]]:
        if part == 0:
            return add(0.0, 0, 0, stop), (stop,)
        fewest = 0 if part == parts - 1 else 1
        starts = range(part, stop - fewest + 1)  # the parts before have at least one each
        return min((add(best(part - 1, s)[0], part, s, stop), (*best(part - 1, s)[1], stop - s)) for s in starts)

    return best(parts - 1, count)


def _too_many(stages: int, chunks: int, count: int) -> str:
    if chunks == 1:
        return (
            f"mesh.pp = {stages} stages of at least one block each, but the model has {count}; use mesh.pp = {count} "
            "or fewer, and give the other ranks to another axis"
        )
    cure = f"mesh.chunks = {count // stages}" if count // stages > 1 else 'mesh.schedule = "1f1b", which has no chunks'
    return (
        f"mesh.pp = {stages} stages x mesh.chunks = {chunks} = {stages * chunks} parts of at least one block each, but "
        f"the model has {count}; use {cure}, or fewer stages"
    )


@dataclass(frozen=True, slots=True)
class Units:
    """The names of a model's layers, in forward order: all before the blocks, the blocks, and all behind them.

    What stands between two blocks, where an encoder ends and a decoder begins, goes with the one before it, and from
    `TO_DECODER` on with the one behind.
    """

    before: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Units:
        """Of the layers of a whole model."""
        starts = [i for i, name in enumerate(names) if _BLOCK.match(name)]
        if TO_DECODER in names and starts[0] < (turn := names.index(TO_DECODER)) < starts[-1]:
            starts[next(i for i, start in enumerate(starts) if start > turn)] = turn
        stop = 1 + max(i for i, name in enumerate(names) if _BLOCK.match(name))
        blocks = tuple(tuple(names[start:end]) for start, end in pairwise([*starts, stop]))
        return cls(tuple(names[: starts[0]]), blocks, tuple(names[stop:]))


def names_of_parts(names: Sequence[str], blocks: Sequence[range]) -> list[tuple[str, ...]]:
    """The names of each part's layers, out of those of the whole model in forward order."""
    units = Units.of(names)
    parts = [tuple(name for i in own for name in units.blocks[i]) for own in blocks]
    parts[0] = (*units.before, *parts[0])
    parts[-1] = (*parts[-1], *units.after)
    return parts


def chosen_chunks(types: Mapping[str, TypedLayer], costs: Mapping[str, float], site: Site, cutting: Cutting) -> Chosen:
    """This rank's chunks, of the types of all layers of the model and what each layer costs, in forward order."""
    stages, stage, names = site.mesh.sizes["pp"], site.mesh.coordinates["pp"], list(costs)
    if stages == 1:
        return Chosen([(tuple(names), site.batch_type)])
    parts = names_of_parts(names, cutting.deal(costs_of(costs), stages, site.mesh.weights("pp")))
    of_stages = [tuple(name for part in parts[each::stages] for name in part) for each in range(stages)]
    return Chosen([(own, types[own[0]].incoming) for own in parts[stage::stages]], of_stages)


def token_costs(
    layers: Mapping[str, Layer], lookups: Mapping[str, float], logits: Mapping[str, int], top_k: int = 0
) -> dict[str, float]:
    """Multiplications a token that each layer takes forward, by the global sizes of its matrices.

    What attention takes beside depends on the sequence and is the same for every block. `lookups`: layers that take
    something else. `logits`: how many each token has of those that a head gives: an element of them is also
    exponentiated and compared, which takes about as long as ten multiplications of a product. `top_k`: experts a token.
    """
    costs = {
        name: float(sum(_multiplications(param, top_k) for param in layer.params().values()))
        for name, layer in layers.items()
    }
    costs |= {name: cost for name, cost in lookups.items() if name in costs}
    return costs | {name: costs[name] + 10.0 * count for name, count in logits.items()}


def _multiplications(param: Param, top_k: int) -> int:
    """Of a token with a parameter's matrices; of those of all experts [e, n, k] it meets `top_k`."""
    shapes = [part.shape for part in param.placement.parts]
    matrices = [(top_k, *shape[1:]) if len(shape) == 3 else shape for shape in shapes]
    return sum(math.prod(shape) for shape in matrices if len(shape) > 1)


def costs_of(layers: Mapping[str, float]) -> Costs:
    """From the cost of each layer by name, in forward order."""
    units = Units.of(list(layers))
    return Costs(
        sum(layers[name] for name in units.before),
        tuple(sum(layers[name] for name in block) for block in units.blocks),
        sum(layers[name] for name in units.after),
    )
