#!/usr/bin/env python3
"""Draw the course's pictures, examples/pictures/*.svg, from the library's own objects.

    python scripts/draw_pictures.py            write all of them
    python scripts/draw_pictures.py --check    say which ones no longer show what the code does

Who holds what comes from `Share`, `HeadShare` and `Placement`; which collective runs where, from a group that records
them while a real block runs forward and backward on four thread ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.comm import Group, run_threads
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.layers import Builder, Layer, Part, Pass, Placement, Rows, init_params, make_site, walk
from mpitp.layers.partition import share_heads
from mpitp.models import config_from_hf
from mpitp.models.llama import build_block

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "pictures"
RANKS = 4
COLORS = ("#4C8BD6", "#E69F00", "#2FA37A", "#C5699B")  # told apart by colour-blind eyes, on white and on black
CONFIG = config_from_hf(
    {
        "model_type": "llama",
        "vocab_size": 27,
        "hidden_size": 16,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 30,
        "max_position_embeddings": 16,
    }
)
STYLE = """
text { font: 12px ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: #1f2328 }
.small { font-size: 10px } .on { fill: #101418 } .title { font-size: 15px; font-weight: 600 } .dim { opacity: .7 }
.line { stroke: #57606a; fill: none } .grey { fill: #8b949e } .empty { fill: none; stroke: #8b949e }
.sum { stroke: #D1372C; fill: #D1372C } .sumtext { fill: #C02B20; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .on { fill: #101418 } .line { stroke: #9aa4af } .sumtext { fill: #ff8a80 }
  .sum { stroke: #ff6b5e; fill: #ff6b5e }
}"""


@dataclass
class Picture:
    """An SVG under way."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str = "", cls: str = "", extra: str = "") -> None:
        color = f' fill="{fill}"' if fill else ""
        name = f' class="{cls}"' if cls else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"{color}{name} {extra}/>')

    def text(self, x: float, y: float, text: str, cls: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{cls}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str = "line", extra: str = "") -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{cls}" {extra}/>')

    def caption(self, y: float, *lines: str) -> None:
        for i, line in enumerate(lines):
            self.text(16, y + 17 * i, line, "small")

    def legend(self, x: float, y: float) -> None:
        for rank, color in enumerate(COLORS):
            self.rect(x + 70 * rank, y - 10, 12, 12, color)
            self.text(x + 70 * rank + 17, y, f"rank {rank}")

    def svg(self, title: str) -> str:
        box = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"><title>{escape(title)}</title>'
        arrow = '<marker id="arrow" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        arrow += '<path d="M0,0 L6,3 L0,6" class="line"/></marker>'
        return "\n".join([head, f"<style>{STYLE}\n</style><defs>{arrow}</defs>", *self.parts, "</svg>\n"])


def on_all_ranks(program: Callable[[Group], Any]) -> list[Any]:
    return run_threads(RANKS, program)


# 1: which rows and columns of each matrix a rank holds


def placements(group: Group) -> dict[str, Placement]:
    """Where every matrix of a block, and the vocabulary's table, lie on this rank."""
    site = make_site(group)
    build = Builder(site, 1.0)
    params = build_block(CONFIG, build, 0, None).params()
    table = build.vocab_table(site.share(CONFIG.vocab_size), CONFIG.hidden_size)
    placed = {name: param.placement for name, param in params.items() if param.data.ndim == 2}
    return {"vocab": table.placement} | placed


def cut_dim(part: Part) -> int:
    """The dim of a matrix that is cut."""
    return next(dim for dim, cut in enumerate(part.dims) if cut.axis)


def draw_matrix(picture: Picture, x: float, y: float, unit: float, ranks: list[Part]) -> None:
    """One global tensor; where several ranks hold the same rows, their colours lie beside one another."""
    dim, shape = cut_dim(ranks[0]), ranks[0].shape
    along, across = shape[dim] * unit, shape[1 - dim] * unit
    for rows, holders in runs(
        [tuple(r for r, own in enumerate(ranks) if i in own.held[dim]) for i in range(shape[dim])]
    ):
        for i, rank in enumerate(holders):
            piece, start = across / len(holders), i * across / len(holders)
            first, length = rows.start * unit, len(rows) * unit
            if dim == 0:
                picture.rect(x + start, y + first, piece, length, COLORS[rank])
            else:
                picture.rect(x + first, y + start, length, piece, COLORS[rank])
    w, h = (across, along) if dim == 0 else (along, across)
    picture.rect(x, y, w, h, cls="empty")


def runs(values: list[tuple[int, ...]]) -> list[tuple[range, tuple[int, ...]]]:
    """Neighbouring places with the same value, together."""
    result: list[tuple[range, tuple[int, ...]]] = []
    for i, value in enumerate(values):
        if result and result[-1][1] == value:
            result[-1] = (range(result[-1][0].start, i + 1), value)
        else:
            result.append((range(i, i + 1), value))
    return result


def cut() -> str:
    every = on_all_ranks(placements)
    picture, unit, top = Picture(860, 340), 5.4, 96
    picture.text(16, 26, "How a block's weights are cut over 4 ranks", "title")
    picture.legend(16, 52)
    picture.text(310, 52, f"h = {CONFIG.hidden_size}, {CONFIG.heads} heads, {CONFIG.kv_heads} KV heads, f = 30, v = 27")
    x = 16.0
    columns: list[tuple[str, str, list[tuple[str, str]]]] = [
        ("vocab", "embedding", [("vocab", "tokens")]),
        ("attention.qkv.weight", "q, k, v", [("q", "q"), ("k", "k"), ("v", "v")]),
        ("attention.out.weight", "out", [("out", "")]),
        ("mlp.gate_up.weight", "gate", [("gate", "")]),
        ("mlp.gate_up.weight", "up", [("up", "")]),
        ("mlp.down.weight", "down", [("down", "")]),
    ]
    for name, label, parts in columns:
        y, widest = float(top), 0.0
        picture.text(x, top - 22, label)
        by_rows = cut_dim(every[0][name].parts[0]) == 0
        picture.text(x, top - 8, "rows are cut" if by_rows else "columns are cut", "small dim")
        for part_name, _ in parts:
            ranks = [next(p for p in own[name].parts if p.name == part_name) for own in every]
            draw_matrix(picture, x, y, unit, ranks)
            h, w = ranks[0].shape
            if len(parts) > 1:
                picture.text(x + w * unit + 5, y + h * unit / 2 + 4, part_name)
            y, widest = y + h * unit + 6, max(widest, w * unit)
        x += widest + (44 if len(parts) > 1 else 34)
    picture.caption(
        292,
        "Column-parallel (rows of W): q, k, v by heads; gate and up by FFN columns. A rank computes its columns of y.",
        "Row-parallel (columns of W): out, down. A rank holds what its own columns feed; the partial y are summed.",
        "Two colours side by side in k and v: a KV head that lives on both ranks. Norm weights are on every rank.",
    )
    return picture.svg("How the weights of a transformer block are cut over four ranks")


# 2: forward and backward


LEAVES = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.gate_up", "mlp.down")


class Recorder(GroupObserver):
    """Notes each collective with the layer that is at work."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []  # (pass, layer, "" or what the collective is)
        self.now = ("forward", "")

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        if not call.op.startswith("wait"):
            self.events.append((*self.now, f"{call.op.removeprefix('start ')} {list(call.shape)}"))
        return run()


def note(layer: Layer, name: str, recorder: Recorder) -> None:
    """From now on this layer tells the recorder when it begins and ends."""

    def noting(direction: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            recorder.now = (direction, name)
            recorder.events.append((direction, name, ""))
            result = run(*args)
            recorder.now = (direction, "")
            return result

        return noted

    for direction in ("forward", "backward"):
        setattr(layer, direction, noting(direction, getattr(layer, direction)))


def record_block(group: Group) -> tuple[list[tuple[str, str, str]], dict[str, tuple[int, ...]]]:
    """The events of a block's forward and backward pass on this rank, and the shapes of its weights."""
    recorder = Recorder()
    block = build_block(CONFIG, Builder(make_site(ObservedGroup(group, recorder)), 0.1), 0, None)
    init_params(block.params().items(), seed=0)
    shapes = {name.removesuffix(".weight"): param.data.shape for name, param in block.params().items()}
    for name, layer in walk(block.children()):
        if name in LEAVES:
            note(layer, name, recorder)
    x, run = np.ones((6, CONFIG.hidden_size), np.float32), Pass(Rows.of((6,)))
    _, ctx = block.forward(x, run)
    block.backward(x, ctx)
    return recorder.events, shapes


COLUMNS = {
    "norm1": 96, "attention.qkv": 196, "heads": 296, "attention.out": 396, "norm2": 526, "mlp.gate_up": 626,
    "activation": 726, "mlp.down": 826,
}  # fmt: skip
BOX = 76


def place_of(direction: str, layer: str) -> float:
    """Where a collective that runs in this layer stands: behind it in the direction of travel."""
    if not layer:
        return COLUMNS["heads"] - 12  # dk and dv
    return COLUMNS[layer] + (BOX + 14 if direction == "forward" else -10)


def forward_backward() -> str:
    results = on_all_ranks(record_block)
    events, shapes = results[0][0], [shape for _, shape in results]
    assert all(other == events for other, _ in results), "the ranks do the same in the same order"
    picture = Picture(960, 430)
    picture.text(16, 26, "A block on 4 ranks, forward and backward, as recorded", "title")
    picture.legend(560, 26)
    for direction, top in (("forward", 74), ("backward", 254)):
        draw_pass(picture, direction, top, events, shapes)
    picture.caption(
        416,
        "Red: all-reduce, every rank gets the sum. Where forward sums (out, down), backward only copies; where forward "
        "copies (qkv, gate_up), backward sums.",
    )
    return picture.svg("Forward and backward pass of a transformer block over four ranks, with the collectives")


def draw_pass(picture: Picture, direction: str, top: int, events: list[tuple[str, str, str]], shapes: list) -> None:
    """One pass: a lane a rank, a column a layer, a red bar a collective."""
    height, gap = 26, 5
    bottom = top + RANKS * (height + gap) - gap
    picture.text(16, top - 22, direction, "title")
    start, stop = (16, 944) if direction == "forward" else (944, 16)
    for rank in range(RANKS):
        y = top + rank * (height + gap) + height / 2
        picture.line(start, y, stop, y, extra='marker-end="url(#arrow)"')
    for name, x in COLUMNS.items():
        picture.text(x + BOX / 2, top - 6, name.split(".")[-1], "small", "middle")
        for rank in range(RANKS):
            y = top + rank * (height + gap)
            is_whole = name.startswith("norm")
            picture.rect(x, y, BOX, height, "" if is_whole else COLORS[rank], "grey" if is_whole else "", 'rx="4"')
            picture.text(x + BOX / 2, y + 17, box_label(name, rank, shapes), "small on", "middle")
    sums: dict[float, list[str]] = {}
    for kind, layer, what in events:
        if what and kind == direction:
            sums.setdefault(place_of(direction, layer), []).append(what)
    for x, calls in sums.items():
        picture.rect(x - 2.5, top - 3, 5, bottom - top + 6, cls="sum", extra='rx="2"')
        shape = calls[0].partition(" ")[2]
        times = f"{len(calls)} x " if len(calls) > 1 else ""
        picture.text(x, bottom + 17, f"{times}sum {shape}", "small sumtext", "middle")


def box_label(name: str, rank: int, shapes: list) -> str:
    """What a rank has there: its heads, its columns of the MLP, or the shape of its weights."""
    if name == "heads":
        own = share_heads(CONFIG.heads, CONFIG.kv_heads, rank, RANKS)
        return f"q{own.query.span.start}-{own.query.span.stop - 1} kv{','.join(map(str, own.kv))}"
    if name == "activation":
        return f"{shapes[rank]['mlp.down'][1]} columns"
    if name.startswith("norm"):
        return f"all of h = {shapes[rank][name][0]}"
    return "W {} x {}".format(*shapes[rank][name])


# 3: heads


def heads() -> str:
    picture = Picture(860, 250)
    picture.text(16, 26, "9 query heads share 3 KV heads, on 4 ranks", "title")
    picture.text(
        16, 45, "Query heads are dealt one by one; a KV head goes to every rank whose query heads use it.", "small"
    )
    x = 16.0
    for rank in range(RANKS):
        own = share_heads(CONFIG.heads, CONFIG.kv_heads, rank, RANKS)
        width = 190
        picture.rect(x, 62, width, 132, cls="empty", extra='rx="8"')
        picture.text(x + 10, 81, f"rank {rank}")
        kv_x = {g: x + width / 2 + (i - (len(own.kv) - 1) / 2) * 66 for i, g in enumerate(own.kv)}
        for j, head in enumerate(own.query.span):
            center = x + width / 2 + (j - (own.query.size - 1) / 2) * 42
            picture.line(center, 122, kv_x[own.kv.start + own.kv_index(j)], 156)
            picture.rect(center - 16, 96, 32, 26, COLORS[rank], extra='rx="4"')
            picture.text(center, 113, f"q{head}", "on", "middle")
        for g, center in kv_x.items():
            shared = g in own.kv_shared
            dash = 'rx="4" stroke-dasharray="4 2" stroke-width="2"' if shared else 'rx="4"'
            picture.rect(center - 24, 156, 48, 26, COLORS[rank], "", 'rx="4"')
            if shared:
                picture.rect(center - 24, 156, 48, 26, cls="sum", extra=dash + ' fill-opacity="0"')
            picture.text(center, 173, f"kv{g}", "on", "middle")
        x += width + 20
    shared = share_heads(CONFIG.heads, CONFIG.kv_heads, 0, RANKS).kv_shared
    names = " and ".join(f"kv{g}" for g in shared)
    picture.caption(
        218,
        f"Dashed: {names} live on two ranks each. Each computes dk and dv from its own query heads, and the two are",
        "added in backward: both replicas get the whole gradient and stay equal. The rank that holds the group's first "
        "query head owns it.",
    )
    return picture.svg("Nine query heads and three KV heads on four ranks")


# 4: vocabulary


IDS, TARGETS = np.array([3, 20, 8, 25, 14]), np.array([20, 8, 25, 14, 1])


def record_vocabulary(group: Group) -> tuple[range, list[str]]:
    """This rank's tokens, and the collectives of embedding, head and loss, forward."""
    recorder = Recorder()
    site = make_site(ObservedGroup(group, recorder))
    build, vocab = Builder(site, 1.0), site.share(CONFIG.vocab_size)
    table = build.vocab_table(vocab, CONFIG.hidden_size)
    y, _ = build.embedding(table, vocab).forward(IDS)
    logits, _ = build.head(table, vocab).forward(y)
    build.loss(vocab).forward(logits, TARGETS)
    return vocab.span, [what for *_, what in recorder.events]


def vocabulary() -> str:
    results = on_all_ranks(record_vocabulary)
    spans, calls = [span for span, _ in results], results[0][1]
    picture, unit, top = Picture(860, 330), 16, 96
    picture.text(16, 26, "The vocabulary is cut: lookup by masking, a loss without gathered logits", "title")
    picture.legend(16, 52)
    picture.text(16, top - 12, "ids")
    for i, token in enumerate(IDS):
        picture.text(34, top + i * unit + 12, str(token), "", "end")
    for rank, span in enumerate(spans):
        x = 52 + rank * 48
        picture.text(x + 19, top - 12, f"{span.start}-{span.stop - 1}", "small", "middle")
        for i, token in enumerate(IDS):
            picture.rect(
                x, top + i * unit, 38, unit - 2, COLORS[rank] if token in span else "", "" if token in span else "empty"
            )
    picture.rect(248, top - 4, 5, 5 * unit + 6, cls="sum")
    for i, token in enumerate(IDS):
        rank = next(r for r, span in enumerate(spans) if token in span)
        picture.rect(266, top + i * unit, 38, unit - 2, COLORS[rank])
    picture.text(285, top - 12, "y [t, h]", "small", "middle")
    picture.text(250, top + 5 * unit + 20, calls[0], "small sumtext", "middle")
    picture.text(52, top + 5 * unit + 20, "one rank has the row,", "small")
    picture.text(52, top + 5 * unit + 34, "the others give zeros", "small")
    draw_logits(picture, 350, top, spans, calls)
    return picture.svg("Embedding and cross entropy over a vocabulary that is cut over four ranks")


def draw_logits(picture: Picture, left: float, top: float, spans: list[range], calls: list[str]) -> None:
    """Each rank's columns of the logits, and what of them is exchanged."""
    cell, unit = 16, 16
    picture.text(
        left, top - 26, f"logits [t, v/tp], v = {CONFIG.vocab_size}: each rank's own columns; x marks the target"
    )
    for rank, span in enumerate(spans):
        for i, target in enumerate(TARGETS):
            for token in span:
                x, y = left + token * cell + rank * 6, top + i * unit
                picture.rect(
                    x, y, cell - 1.5, unit - 2, COLORS[rank], extra="" if token == target else 'fill-opacity=".45"'
                )
                if token == target:
                    picture.text(x + 7, y + 11, "x", "small on", "middle")
        center = left + (span.start + len(span) / 2) * cell + rank * 6
        picture.line(center, top + 5 * unit + 4, center, top + 5 * unit + 26, extra='marker-end="url(#arrow)"')
        picture.text(center, top + 5 * unit + 42, "m, Z, target's logit", "small", "middle")
    bar = top + 5 * unit + 56
    width = CONFIG.vocab_size * cell + 18
    for i, what in enumerate(calls[1:]):
        meaning = ("m: the largest logit of every token", "Z: the sum of exp(logit - m), and the target's logit")[i]
        picture.rect(left, bar + i * 30, width, 5, cls="sum")
        name = "max" if i == 0 else "sum"
        picture.text(left, bar + i * 30 + 19, f"{name} {what.partition(' ')[2]}", "small sumtext")
        picture.text(left + 90, bar + i * 30 + 19, meaning, "small")
    numbers = 3 * len(IDS)
    picture.text(left, bar + 76, f"loss = log Z + m - target's logit: {numbers} numbers a rank cross the wire, not the "
                 f"{len(IDS) * CONFIG.vocab_size} logits.", "small")  # fmt: skip


PICTURES: dict[str, Callable[[], str]] = {
    "cut": cut,
    "forward_backward": forward_backward,
    "heads": heads,
    "vocabulary": vocabulary,
}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for name, draw in PICTURES.items():
        path, svg = FOLDER / f"{name}.svg", draw()
        if sys.argv[1:] == ["--check"]:
            stale += [] if path.exists() and path.read_text(encoding="utf-8") == svg else [path.name]
        else:
            path.write_text(svg, encoding="utf-8")
    if stale:
        print(f"no longer what the code does: {', '.join(stale)}; run scripts/draw_pictures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
