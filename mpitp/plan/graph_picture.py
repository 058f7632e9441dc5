"""An operator graph as an SVG: on the left the stages with their layers folded, on the right one block, opened.

Everything stands in one column or the other, in rows of known heights, so that nothing overlaps: arrays that go past
others (residual connections) have lanes of their own at the right. Light and dark as the reader's system has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mpitp.layers.layer import FORWARD
from mpitp.plan.graph_text import (
    Line,
    Seconds,
    amount,
    duration,
    folded_names,
    head_words,
    lines_of_layer,
    stage_with,
    words_of_collective,
)
from mpitp.plan.nodes import Collective, Operation
from mpitp.plan.step_graph import StageGraph, StepGraph

# Okabe and Ito's colours: told apart by colour-blind readers too
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f7f7f")
INTRA, INTER = "#d1495b", "#e07b00"  # of the two kinds of cuts

LETTER = 7.2  # pixels of a letter of size 12, at most
MARGIN, TOP = 16, 64
ITEM, GAP = 24, 8  # a folded layer
OPERATION, PILL, SPACE = 54, 26, 20  # rows of the opened block and the room between them
LANE = 14
ZOOM = 70  # between the columns
MOST_BANDS = 9
MOST_CELLS = 16

_STYLE = """<style>
svg{--paper:#ffffff;--ink:#1b2430;--soft:#5b6776;--box:#f4f6f8;--edge:#8a96a3;--whole:#c3ccd5}
@media (prefers-color-scheme:dark){
svg{--paper:#12161c;--ink:#e6ebf0;--soft:#a3afbb;--box:#1e252e;--edge:#77838f;--whole:#55616d}}
text{fill:var(--ink);font-family:sans-serif;font-size:12px}
.soft{fill:var(--soft);font-size:11px}.strong{font-weight:600}
.box{fill:var(--box);stroke:var(--edge)}.line{fill:none;stroke:var(--edge);stroke-width:1.4}
.zoom{fill:none;stroke:var(--edge);stroke-dasharray:2 4}
</style>"""


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the opened block and where it stands."""

    line: Line
    y: int
    height: int


def graph_svg(graph: StepGraph, opened: str, seconds: Seconds | None = None) -> str:
    """The picture as text."""
    words = head_words(graph)
    bands, left_width, anchor, left_bottom = _stages(graph, opened)
    x = MARGIN + left_width + ZOOM
    panel, right_width, right_bottom = _opened(graph, opened, x, seconds)
    bottom = max(left_bottom, right_bottom)
    legend, legend_width, height = _legend(graph, bottom + 18)
    width = max(x + right_width, legend_width, MARGIN * 2 + int(LETTER * max(map(len, words)))) + MARGIN
    zoom = f'<path class="zoom" d="M{MARGIN + left_width} {anchor} L{x - 12} {TOP}"/>'
    zoom += f'<path class="zoom" d="M{MARGIN + left_width} {anchor + ITEM} L{x - 12} {right_bottom - 6}"/>'
    heads = "".join(_text(MARGIN, 22 + 18 * i, word, "strong" if i == 0 else "soft") for i, word in enumerate(words))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n{_STYLE}\n<rect width="100%" height="100%" fill="var(--paper)"/>\n'
        f"{heads}\n{bands}{zoom}\n{panel}{legend}</svg>\n"
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _stages(graph: StepGraph, opened: str) -> tuple[str, int, int, int]:
    """The left column: (SVG, its width, y of the opened layer, where it ends)."""
    parts = _parts(graph, opened)
    words = [_title(graph, stage) for stage, _ in parts if stage] + [name for _, own in parts for name in own]
    width = 24 + int(LETTER * max(map(len, [*words, _message(graph)])))
    made, y, anchor = [], TOP, TOP
    for number, (stage, own) in enumerate(parts):
        if number:
            made.append(_inter_cut(graph, MARGIN, y, width, has_words=stage is not None))
            y += 30
        if stage is None:
            made.append(_text(MARGIN + 12, y + 14, own[0], "soft"))
            y += 24
            continue
        height = 26 + len(own) * (ITEM + GAP)
        colour = _colour(stage.stage)
        made.append(
            f'<rect x="{MARGIN}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" fill-opacity=".16" '
            f'stroke="{colour}"/>'
        )
        made.append(_text(MARGIN + 10, y + 17, _title(graph, stage)))
        for i, name in enumerate(own):
            top = y + 26 + i * (ITEM + GAP)
            is_open = name == opened
            anchor = top if is_open else anchor
            edge = f' style="stroke:{colour};stroke-width:2.5"' if is_open else ""
            made.append(
                f'<rect class="box"{edge} x="{MARGIN + 10}" y="{top}" width="{width - 20}" height="{ITEM}" rx="4"/>'
            )
            made.append(_text(MARGIN + 20, top + 16, name, "strong" if is_open else ""))
        y += height
    return "\n".join(made) + "\n", width, anchor, y


def _parts(graph: StepGraph, opened: str) -> list[tuple[StageGraph | None, list[str]]]:
    """The parts of the model in forward order with the names in them; None: several that are left out."""
    chunks = len(graph.stages[0].chunks)
    order = [(stage, list(stage.chunks[chunk])) for chunk in range(chunks) for stage in graph.stages]
    order[-1][1].append("loss")
    place = next(i for i, (_, own) in enumerate(order) if opened in own)
    last = len(order) - 1
    shown = sorted({0, 1, place - 1, place, place + 1, last - 1, last} & set(range(len(order))))
    shown = list(range(len(order))) if len(order) <= MOST_BANDS else shown
    result: list[tuple[StageGraph | None, list[str]]] = []
    for before, number in zip([-1, *shown], shown, strict=False):
        if number - before > 1:
            result.append((None, [f"... {number - before - 1} more like these"]))
        result.append((order[number][0], folded_names(order[number][1], opened)))
    return result


def _title(graph: StepGraph, stage: StageGraph) -> str:
    count = graph.ranks // len(graph.stages)
    first = stage.stage * count
    ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
    return f"stage {stage.stage}: {ranks}, {amount(stage.flops(), 'F')} a step each"


def _message(graph: StepGraph) -> str:
    """What goes from stage to stage: in a decoder that reads an encoder's output, this beside the activations."""
    sizes: dict[str, float] = {}
    for node in (each for stage in graph.stages for each in stage.first.collectives):
        if node.is_message and node.op == "send" and node.phase == FORWARD:
            sizes[node.layer] = sizes.get(node.layer, 0.0) + float(node.given_bytes)
    if not sizes:
        return ""
    told = " to ".join(dict.fromkeys(amount(size, "B") for size in (min(sizes.values()), max(sizes.values()))))
    return f"{told} each way, {graph.stages[0].microbatches} x a step"


def _inter_cut(graph: StepGraph, x: int, y: int, width: int, *, has_words: bool) -> str:
    line = f'<path d="M{x} {y + 15} h{width}" stroke="{INTER}" stroke-width="3" stroke-dasharray="9 4"/>'
    words = _message(graph) if has_words else ""
    room = int(LETTER * len(words)) + 8
    back = f'<rect x="{x + 20}" y="{y + 6}" width="{room}" height="18" fill="var(--paper)"/>' if words else ""
    return line + back + (_text(x + 24, y + 19, words, "soft") if words else "")


def _opened(graph: StepGraph, opened: str, x: int, seconds: Seconds | None) -> tuple[str, int, int]:
    """The right column: (SVG, its width, where it ends)."""
    stage = stage_with(graph, opened)
    lines = lines_of_layer(stage.first, opened)
    rows, y = [], TOP + 56
    for line in lines:
        height = OPERATION if isinstance(line.node, Operation) else PILL
        rows.append(_Row(line, y, height))
        y += height + SPACE
    width = 24 + int(LETTER * max(len(a) + len(b) + 3 for row in rows for a, b in _words(row.line, opened, seconds)))
    title = f"{opened}: a microbatch on the first rank of stage {stage.stage}"
    edges, lanes = _edges(rows, x, width)
    made = [_text(x, TOP + 12, title, "strong"), _text(x, TOP + 34, "what came before", "soft"), edges]
    made += [_operation(row, x, width, opened, graph, seconds) for row in rows]
    made.append(_text(x, y + 12, "on to what follows", "soft"))
    return "\n".join(made) + "\n", max(width + LANE * (lanes + 1), int(LETTER * len(title))), y + 20


def _words(line: Line, opened: str, seconds: Seconds | None) -> list[tuple[str, str]]:
    """Left and right words of each line of text in a box."""
    node, back = line.node, line.backward
    again = " (twice)" if node.passes > 1 else ""
    if isinstance(node, Collective):
        took = duration(seconds(node)) if seconds else ""
        return [(f"{'backward: ' if line.is_backward else ''}{words_of_collective(node)}{again}", took)]
    assert isinstance(node, Operation)
    numbers = [amount(node.flops, "F") + " forward" if node.flops else ""]
    numbers += [amount(back.flops, "F") + " backward" if back and back.flops else ""]
    numbers += [amount(node.moved_bytes + (back.moved_bytes if back else 0), "B") + " moved"]
    numbers += [amount(node.kept_bytes, "B") + " kept" if node.kept_bytes else ""]
    took = " + ".join(duration(seconds(each)) for each in (node, back) if each) if seconds else ""
    name = node.layer.removeprefix(f"{opened}.")
    return [(name + again, str(node.output)), (", ".join(filter(None, numbers)), took)]


def _operation(row: _Row, x: int, width: int, opened: str, graph: StepGraph, seconds: Seconds | None) -> str:
    words = _words(row.line, opened, seconds)
    y, node = row.y, row.line.node
    if isinstance(node, Collective):
        colour = INTER if node.is_message else INTRA
        dash = ' stroke-dasharray="5 3"' if row.line.is_backward else ""
        box = (
            f'<rect x="{x}" y="{y}" width="{width}" height="{PILL}" rx="13" fill="var(--paper)" stroke="{colour}" '
            f'stroke-width="2"{dash}/>'
        )
        return box + _text(x + 14, y + 17, words[0][0]) + _text(x + width - 12, y + 17, words[0][1], "soft", "end")
    box = f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{OPERATION}" rx="5"/>'
    texts = _text(x + 10, y + 17, words[0][0], "strong") + _text(x + width - 10, y + 17, words[0][1], "", "end")
    texts += _text(x + 10, y + 34, words[1][0], "soft") + _text(x + width - 10, y + 34, words[1][1], "soft", "end")
    return box + texts + _shard_cells(row.line, x + 10, y + 41, width - 20, graph.sizes["tp"])


def _shard_cells(line: Line, x: int, y: int, width: int, ranks: int) -> str:
    """A strip: a colour a rank of tp where each has its own piece or summand, one grey where all have the same."""
    node = line.node
    letter = dict(node.output.letters).get("tp", "I") if node.output else "I"
    count = min(ranks, MOST_CELLS)
    if ranks == 1 or letter in "IR":
        return f'<rect x="{x}" y="{y}" width="{width}" height="6" fill="var(--whole)"/>'
    step = width / count
    return "".join(
        f'<rect x="{x + i * step:.1f}" y="{y}" width="{step - 1.5:.1f}" height="6" fill="{_colour(i)}"/>'
        for i in range(count)
    )


def _edges(rows: Sequence[_Row], x: int, width: int) -> tuple[str, int]:
    """Arrows down the column, and lanes at the right for what goes past: (SVG, how many lanes)."""
    middle, right = x + width // 2, x + width
    tops = [TOP + 40, *(row.y + row.height for row in rows)]
    made = [
        f'<path class="line" marker-end="url(#tip)" d="M{middle} {tops[number]} V{row.y}"/>'
        for number, row in enumerate(rows)
        if number not in _apart(rows)
    ]
    made.append(f'<path class="line" marker-end="url(#tip)" d="M{middle} {tops[-1]} v{SPACE - 2}"/>')
    taken: list[int] = []  # where each lane is free again
    for start, stop in sorted(_going_past(rows)):
        lane = next((i for i, free in enumerate(taken) if free <= start), len(taken))
        taken[lane : lane + 1] = [stop]
        out = right + LANE * (lane + 1)
        begin = TOP + 46 if start < 0 else rows[start].y + rows[start].height * 2 // 3
        from_x = middle if start < 0 else right
        end = rows[stop].y + rows[stop].height // 3
        made.append(f'<path class="line" marker-end="url(#tip)" d="M{from_x} {begin} H{out} V{end} H{right}"/>')
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="var(--edge)"/></marker></defs>'
    )
    return tip + "\n".join(made), len(taken)


def _going_past(rows: Sequence[_Row]) -> Iterator[tuple[int, int]]:
    """(from, to) of arrays that don't come from the row of the forward pass just above; from -1: from outside."""
    place = {row.line.node.name: number for number, row in enumerate(rows)}
    above = -1
    for number, row in enumerate(rows):
        if row.line.is_backward:
            continue
        for name in row.line.node.inputs:
            if place.get(name, -1) != above:
                yield place.get(name, -1), number
        above = number


def _apart(rows: Sequence[_Row]) -> set[int]:
    """Rows that nothing comes to from the row above: the first ones of branches beside what stands above."""
    found, above, first = set(), "", 0
    for number, row in enumerate(rows):
        if row.line.is_backward:
            continue
        if above and above not in row.line.node.inputs:
            found.add(first)
        above, first = row.line.node.name, number + 1
    return found


def _legend(graph: StepGraph, y: int) -> tuple[str, int, int]:
    """What colours and letters mean: (SVG, its width, where the picture ends)."""
    entries = [
        (f'<rect x="{{x}}" y="{{y}}" width="26" height="12" rx="6" fill="none" stroke="{INTRA}" stroke-width="2"/>',
         "intra-operator cut: the shards of one operator exchange arrays (dashed: in the backward pass)"),
        (f'<path d="M{{x}} {{m}} h26" stroke="{INTER}" stroke-width="3" stroke-dasharray="9 4"/>',
         "inter-operator cut: a message between stages"),
        ("".join(f'<rect x="{{x{i}}}" y="{{y}}" width="6" height="12" fill="{_colour(i)}"/>' for i in range(4)),
         f"each of {graph.sizes['tp']} ranks along tp has its own piece or summand"),
        ('<rect x="{x}" y="{y}" width="26" height="12" fill="var(--whole)"/>', "every rank along tp has the same"),
    ]  # fmt: skip
    letters = (
        "after an array, along each axis: I equal values, R equal and each for its own part, V own piece, P summand"
    )
    made = []
    for number, (shape, words) in enumerate(entries):
        top = y + 20 * number
        places = {f"x{i}": MARGIN + 6.5 * i for i in range(4)} | {"x": MARGIN, "y": top, "m": top + 6}
        made.append(shape.format(**places) + _text(MARGIN + 36, top + 11, words, "soft"))
    made.append(_text(MARGIN, y + 20 * len(entries) + 11, letters, "soft"))
    longest = max(len(words) for words in [*(words for _, words in entries), letters])
    return "\n".join(made) + "\n", MARGIN * 2 + 36 + int(6.4 * longest), y + 20 * len(entries) + 28
