#!/usr/bin/env python3
"""Draw README's moving picture, examples/pictures/moving.svg: an MLP on three ranks, forward and backward in steps.

    python scripts/draw_moving.py              write it
    python scripts/draw_moving.py --check      say whether it still shows what the code computes

The numbers are those of the library's layers on thread ranks. It moves by CSS alone; where motion isn't wanted or isn't
known, it stands still with everything in view.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np

from mpitp.comm import Group, run_threads
from mpitp.layers import Builder, init_params, make_site

DRAW = run_path(str(Path(__file__).parent / "draw_pictures.py"))
Picture, STYLE, COLORS = DRAW["Picture"], DRAW["STYLE"], DRAW["COLORS"]
PATH = Path(__file__).resolve().parent.parent / "examples" / "pictures" / "moving.svg"
RANKS, HIDDEN, FFN = 3, 2, 7
SECONDS = 1.8  # a step
LEFT, TOP, ROW, COLUMN = 84, 62, 84, 196  # of the first box; from rank to rank, from box to box
CAPTIONS = (
    "x is the same on every rank",
    "column-parallel: every rank computes its own inner columns, relu(x Wup_r^T)",
    "row-parallel: from its own columns every rank has a summand of y",
    "the one collective of the forward pass: all-reduce, y = y_0 + y_1 + y_2, on every rank",
    "backward: dy is the same on every rank; where forward summed, backward copies",
    "every rank has the gradient of its own inner columns",
    "and a summand of dx",
    "where forward copied, backward sums: all-reduce, dx = dx_0 + dx_1 + dx_2",
)


@dataclass
class Numbers:
    """One rank's arrays of a token, in the order of `CAPTIONS`."""

    arrays: tuple[np.ndarray, ...]


def compute(group: Group) -> Numbers:
    """An MLP's passes by hand, from the library's products and pairs."""
    build = Builder(make_site(group, dtype="float64"), init_std=0.8)
    share = build.site.share(FFN)
    up, down = build.column(("up",), HIDDEN, share, bias=False), build.row("down", share, HIDDEN, bias=False)
    init_params([*((f"up.{n}", p) for n, p in up.params().items()), *down.params().items()], seed=34)
    x, dy = np.array([[1.0, -0.5]]), np.array([[0.5, 1.0]])
    inner, up_ctx = up.forward(x)
    act = np.maximum(inner, 0)
    y, down_ctx = down.forward(act)
    dact = down.backward(dy, down_ctx)
    dinner = dact * (inner > 0)
    dx = up.backward(dinner, up_ctx)
    partial_y, partial_dx = act @ down.product.weight.data.T, dinner @ up.product.weight.data
    return Numbers((x, act, partial_y, y, dy, dact, partial_dx, dx))


def told(array: np.ndarray) -> str:
    """Such as: 0.31 -1.20."""
    return "  ".join(f"{round(value, 2) + 0.0:.2f}" for value in array[0]) or "none"


def style() -> str:
    """What appears when: everything from its step on, captions during theirs."""
    count = len(CAPTIONS)
    rules = [STYLE, ".note { opacity: 0 } .note7 { opacity: 1 }", "@media (prefers-reduced-motion: no-preference) {"]
    for step in range(count):
        start, stop = 100 * step / count, 100 * (step + 1) / count
        rules += [
            f"@keyframes s{step} {{ 0%, {start:g}% {{ opacity: .08 }} {start + 3:g}%, 98% {{ opacity: 1 }} }}",
            f"@keyframes n{step} {{ 0%, {start:g}% {{ opacity: 0 }} {start + 2:g}%, {stop - 0.5:g}% {{ opacity: 1 }} "
            f"{stop:g}%, 100% {{ opacity: 0 }} }}",
            f".step{step} {{ animation: s{step} {SECONDS * count:g}s infinite }}",
            f".note{step} {{ animation: n{step} {SECONDS * count:g}s infinite }}",
        ]
    return "\n".join([*rules, "}"])


def draw(ranks: list[Numbers]) -> str:
    """The picture's text."""
    p: Any = Picture(860, 356)
    p.text(16, 26, "One token through an MLP on three ranks, forward (upper boxes) and backward (lower)", "title")
    p.text(16, 44, "numbers of the library's own layers; colours are ranks", "small")
    for rank, numbers in enumerate(ranks):
        top = TOP + ROW * rank
        p.text(16, top + 36, f"rank {rank}")
        for step, array in enumerate(numbers.arrays):
            _box(p, rank, step, told(array))
    for step, column in ((3, 2), (7, 1)):
        _sum(p, step, column)
    for step, caption in enumerate(CAPTIONS):
        p.parts.append(f'<g class="note{step} note">')
        p.text(LEFT, TOP + RANKS * ROW + 18, f"{step + 1}  {caption}")
        p.parts.append("</g>")
    body = "\n".join(p.parts)
    title = "An MLP on three ranks, forward and backward: each rank its own columns, one sum each way"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {p.width} {p.height}" width="{p.width}" '
        f'height="{p.height}" role="img"><title>{title}</title>\n<style>{style()}\n</style>\n{body}\n</svg>\n'
    )


def _box(p: Any, rank: int, step: int, numbers: str) -> None:
    """Forward from left to right in the upper half of a rank's row, backward from right to left in the lower one."""
    forward = step < 4
    column = step if forward else 7 - step
    x, y = LEFT + COLUMN * column, TOP + ROW * rank + (0 if forward else 36)
    name = ("x", "columns", "summand", "y", "dy", "d columns", "summand", "dx")[step]
    p.parts.append(f'<g class="step{step}">')
    p.rect(x, y, 150, 30, COLORS[rank], "", f'rx="4" fill-opacity="{0.95 if forward else 0.6}"')
    p.text(x + 6, y + 12, name, "on small")
    p.text(x + 144, y + 24, numbers, "on small", "end")
    p.parts.append("</g>")


def _sum(p: Any, step: int, column: int) -> None:
    """The collective behind a column's boxes (forward) or before it (backward): a bar over all ranks."""
    x = LEFT + COLUMN * column + (173 if step == 3 else -23)
    offset = 4 if step == 3 else 40
    p.parts.append(f'<g class="step{step}">')
    p.rect(x - 3, TOP + offset, 6, ROW * (RANKS - 1) + 22, "", "sum", 'rx="3"')
    p.text(x, TOP + ROW * (RANKS - 1) + offset + 38, "sum", "sumtext small", "middle")
    p.parts.append("</g>")


def main() -> None:
    text = draw(run_threads(RANKS, compute))
    if "--check" in sys.argv[1:]:
        if not PATH.is_file() or PATH.read_text(encoding="utf-8") != text:
            sys.exit(f"{PATH} isn't what the code computes now: run python scripts/draw_moving.py")
        return
    PATH.write_text(text, encoding="utf-8")
    print(PATH, file=sys.stderr)


if __name__ == "__main__":
    main()
