"""An operator graph in words: a line for each folded part of the model, and the nodes of one block, opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpitp.errors import UsageError
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.plan.nodes import Collective, Node, Operation, RankGraph
from mpitp.plan.step_graph import StageGraph, StepGraph

Seconds = Callable[[Node], float]  # how long a node takes; there is none without a machine file

_BLOCK = re.compile(r"(|encoder\.)blocks\.(\d+)")
_PREFIXES = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]


def amount(value: float, unit: str) -> str:
    """Three digits with a prefix: 1.23 GF, 512 B."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Such as 3.21 ms."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def block_of(graph: StepGraph, wish: str) -> str:
    """The layer to open: "3" is "blocks.3", "" the first block. Raises UsageError where there is none of this name."""
    names = [name for stage in graph.stages for own in stage.chunks for name in own] + ["loss"]
    first = next((name for name in names if name.startswith("blocks.")), names[0])
    name = f"blocks.{wish}" if wish.isdigit() else wish or first
    if name not in names:
        count = sum(each.startswith("blocks.") for each in names)
        source = sum(each.startswith("encoder.blocks.") for each in names)
        sides = f" of the decoder, encoder.blocks.0 to {source - 1}" if source else ""
        others = ", ".join(each for each in names if not _BLOCK.fullmatch(each))
        raise UsageError(f"--open {wish}: the model has blocks 0 to {count - 1}{sides}, and {others}")
    return name


def stage_with(graph: StepGraph, name: str) -> StageGraph:
    """The stage that has a layer; the loss is where the head is."""
    stage = graph.stage_of("head" if name == "loss" else name)
    assert stage is not None, f"no stage has {name}"
    return stage


def folded_names(names: Sequence[str], opened: str) -> list[str]:
    """Neighbouring blocks in one, but for the opened one: embedding, blocks 0-2, blocks.3, blocks 4-7, head."""
    found: list[tuple[str, int, int]] = []  # a name, or a side of the model with its first and last block
    is_named: list[bool] = []
    for name in names:
        block = _BLOCK.fullmatch(name) if name != opened else None
        side, number = (block[1], int(block[2])) if block else (name, -1)
        if block and found and not is_named[-1] and found[-1][0] == side and found[-1][2] == number - 1:
            found[-1] = (side, found[-1][1], number)
        else:
            found.append((side, number, number))
            is_named.append(block is None)
    told = zip(found, is_named, strict=True)
    return [side if named else f"{side}blocks" + (f" {a}-{b}" if b > a else f".{a}") for (side, a, b), named in told]


@dataclass(frozen=True, slots=True)
class Line:
    """A node of an opened layer: forward nodes in order, with the backward pass's collectives in their places."""

    node: Node
    backward: Operation | None  # the mirror of an operation

    @property
    def is_backward(self) -> bool:
        """A collective of the backward pass."""
        return self.node.phase == BACKWARD


def lines_of_layer(graph: RankGraph, name: str) -> list[Line]:
    """A sum of dx stands before the layer whose dx it is, a gather of dy behind it: as data flows forward."""
    nodes = [node for node in graph.nodes.values() if node.layer == name or node.layer.startswith(f"{name}.")]
    place = {node.name: number for number, node in enumerate(graph.nodes.values())}
    mirrors = {n.layer: n for n in nodes if isinstance(n, Operation) and n.phase == BACKWARD}
    late = [node for node in nodes if isinstance(node, Collective) and node.phase == BACKWARD and not node.is_message]
    lines: list[Line] = []
    for node in (each for each in nodes if each.phase == FORWARD):
        own = [each for each in late if each.layer == node.layer and isinstance(node, Operation)]
        mirror = mirrors.get(node.layer) if isinstance(node, Operation) else None
        before = [each for each in own if mirror and place[each.name] > place[mirror.name]]
        lines += [Line(each, None) for each in reversed(before)]
        lines.append(Line(node, mirror))
        lines += [Line(each, None) for each in own if each not in before]
    return lines


def words_of_collective(node: Collective) -> str:
    """Such as: all_reduce sum along tp of 4, 12.6 MB."""
    calls = f"{node.calls} x " if node.calls > 1 else ""
    size = amount(float(node.given_bytes) / max(node.calls, 1), "B")
    what = " of the encoder's output" if node.name.startswith(f"{node.layer} memory ") else ""
    return f"{node.op}{what} along {node.axis} of {node.ranks}, {calls}{size}"


def head_words(graph: StepGraph) -> list[str]:
    """What the graph is of."""
    axes = " x ".join(f"{axis} {size}" for axis, size in graph.sizes.items() if size > 1) or "one rank"
    schedule = f" by {graph.schedule}" if graph.schedule else ""
    count = graph.stages[0].microbatches
    flops = sum(stage.flops() for stage in graph.stages) * (graph.ranks // len(graph.stages))
    return [
        f"{graph.model_type} in {graph.dtype} on {graph.ranks} ranks: {axes}",
        f"a step: {count} microbatch{'es' * (count > 1)} of {graph.tokens:,} tokens a replica{schedule}; about "
        f"{amount(flops, 'F')} in products on all ranks",
    ]


def graph_text(graph: StepGraph, opened: str, seconds: Seconds | None = None) -> str:
    """The whole in lines of about 116 columns."""
    lines = [*head_words(graph), ""]
    in_stage = graph.ranks // len(graph.stages)
    for stage in graph.stages:
        ranks = f"ranks {stage.stage * in_stage}-{(stage.stage + 1) * in_stage - 1}"
        names = " | ".join(", ".join(folded_names(own, opened)) for own in stage.chunks)
        lines.append(f"stage {stage.stage} ({ranks}): {names}")
        kept, params = amount(stage.first.kept_bytes(), "B"), amount(stage.params, "").strip()
        lines.append(
            f"    a rank, a step: {amount(stage.flops(), 'F')}; {params} parameters, {kept} kept a "
            f"microbatch; to collectives {_by_axis(stage)}"
        )
    own = stage_with(graph, opened)
    lines += ["", f"{opened}, opened: a microbatch on the first rank of stage {own.stage}{_shards(own, opened)}", ""]
    lines += _table(lines_of_layer(own.first, opened), opened, seconds)
    lines += [
        "",
        f"once a step (stage {own.stage})",
        *(_update_line(node, seconds) for node in own.update),
        "",
        *_LEGEND,
    ]
    return "\n".join(lines)


_LEGEND = (
    "= an intra-operator cut: shards of one operator exchange arrays; # an inter-operator cut: a message of stages.",
    "Arrays are [rows, width] of a rank and a letter along each axis: I equal, R equal and each for its own part,",
    "V its own piece, P a summand. F: multiplications and additions of products; moved: read and written.",
)


def _by_axis(stage: StageGraph) -> str:
    nodes = [*stage.first.collectives, *(node for node in stage.update if isinstance(node, Collective))]
    axes = dict.fromkeys(node.axis for node in nodes)
    every = "pp+dp+ep+cp+tp"
    told = [f"{'all' if axis == every else axis} {amount(stage.given_bytes(axis), 'B')}" for axis in axes]
    return ", ".join(told) or "nothing"


def _shards(stage: StageGraph, opened: str) -> str:
    """How the shards of the last rank differ, where they do."""
    first, last = (_flops_of(graph, opened) for graph in (stage.first, stage.last))
    return "" if first == last else f" ({amount(first, 'F')}; on the last rank along tp {amount(last, 'F')})"


def _flops_of(graph: RankGraph, name: str) -> int:
    return sum(
        node.flops * node.passes for node in graph.operations if node.layer == name or node.layer.startswith(f"{name}.")
    )


def _table(lines: Sequence[Line], opened: str, seconds: Seconds | None) -> list[str]:
    timed = f" {'forward s':>10} {'backward s':>10}" if seconds else ""
    head = f"  {'operation':24} {'its output':30} {'forward':>9} {'backward':>9} {'moved':>9} {'kept':>9}{timed}"
    return [head, *(_line(line, opened, seconds) for line in lines)]


def _line(line: Line, opened: str, seconds: Seconds | None) -> str:
    node = line.node
    name = node.layer.removeprefix(f"{opened}.")
    again = " (twice: recomputed)" if node.passes > 1 else ""
    if isinstance(node, Collective):
        mark = "#" if node.is_message else "="
        when = " in backward" if line.is_backward else ""
        took = f"   {duration(seconds(node))}" if seconds else ""
        return f"{mark}   {words_of_collective(node)}{when}{again}{took}"
    assert isinstance(node, Operation)
    back = line.backward
    moved = node.moved_bytes + (back.moved_bytes if back else 0)
    numbers = [amount(node.flops, "F") if node.flops else "", amount(back.flops, "F") if back and back.flops else ""]
    numbers += [amount(moved, "B"), amount(node.kept_bytes, "B") if node.kept_bytes else ""]
    took = f" {duration(seconds(node)):>10} {duration(seconds(back)) if back else '':>10}" if seconds else ""
    return f"  {name:24} {node.output!s:30} " + " ".join(f"{number:>9}" for number in numbers) + took + again


def _update_line(node: Node, seconds: Seconds | None) -> str:
    took = f"   {duration(seconds(node))}" if seconds else ""
    if isinstance(node, Collective):
        return f"{'#' if node.is_message else '='}   {node.layer}: {words_of_collective(node)}{took}"
    assert isinstance(node, Operation)
    return f"    {node.layer}: {amount(node.moved_bytes, 'B')} moved{took}"
