"""A pipeline's timeline as a picture: SVG written by hand, PNG by matplotlib."""

from __future__ import annotations

import io
from html import escape
from importlib.util import find_spec
from pathlib import Path

from mpitp.errors import UsageError
from mpitp.files import check_place, replace_file
from mpitp.pipeline.actions import Kind
from mpitp.pipeline.simulate import Timed
from mpitp.plan.schedule_report import Report, words_of
from mpitp.plan.text_chart import NAMES, label, shortest

# Okabe and Ito's colours: told apart by colour-blind readers too
COLOURS = {Kind.FORWARD: "#0072b2", Kind.BACKWARD: "#d55e00", Kind.INPUT_GRAD: "#d55e00", Kind.WEIGHT_GRAD: "#009e73"}

ROW, BAR, LEFT, TOP = 30, 24, 70, 56  # pixels: a row and the bar in it; margins
LEAST_WIDTH, MOST_WIDTH = 640, 8000
CELL, LETTER = 26, 7  # pixels of the shortest action, where there is room; of a letter


def check_picture(path: Path) -> None:
    """Raise UsageError or FileError, before anything is computed, where there will be no picture."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"--out {path}: the name must end in .svg or .png")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise UsageError(f'--out {path}: a .png needs matplotlib: pip install "mpitp[plot]"; a .svg needs nothing')
    check_place(path, "draw to")


def draw(report: Report, path: Path) -> None:
    """Write the picture; an older one stays until the new one is whole."""
    content = svg_of(report) if path.suffix == ".svg" else _png_of(report)
    replace_file(path, content)


def svg_of(report: Report) -> str:
    """The picture as text: one rectangle an action, which says on hovering what it is."""
    timeline = report.timeline
    width = min(MOST_WIDTH, max(LEAST_WIDTH, CELL * timeline.length / shortest(timeline)))
    scale, stages = width / timeline.length, timeline.grid.stages
    height = TOP + ROW * stages
    rows = [_svg_row(stage, own, scale, timeline.grid.chunks) for stage, own in enumerate(timeline.timed)]
    empty = "".join(
        f'<rect x="{LEFT}" y="{TOP + ROW * stage}" width="{width:g}" height="{BAR}" fill="#eceff1"/>\n'
        for stage in range(stages)
    )
    words = [f'<text x="8" y="{18 + 16 * i}">{escape(line)}</text>' for i, line in enumerate(words_of(report)[:2])]
    feet = _svg_feet(report, height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + width + 10:g} {height + 58}" '
        f'width="{LEFT + width + 10:g}" height="{height + 58}" font-family="sans-serif" font-size="12" role="img">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{chr(10).join(words)}\n{empty}{"".join(rows)}{feet}</svg>\n'
    )


def _svg_row(stage: int, own: list[Timed], scale: float, chunks: int) -> str:
    y = TOP + ROW * stage
    bars = (_svg_bar(timed, scale, y, chunks) for timed in own if timed.stop > timed.start)
    return f'<text x="8" y="{y + 16}">stage {stage}</text>\n' + "".join(bars)


def _svg_bar(timed: Timed, scale: float, y: int, chunks: int) -> str:
    x, width = LEFT + timed.start * scale, (timed.stop - timed.start) * scale
    name, action = label(timed.action, chunks), timed.action
    chunk = f", chunk {action.chunk}" if chunks > 1 else ""
    said = f"{NAMES[action.kind]} of microbatch {action.microbatch}{chunk}: {timed.start:g} to {timed.stop:g}"
    opacity = 1 - 0.45 * action.chunk / max(1, chunks - 1)
    text = f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" font-size="11" fill="white">{name}</text>'
    return (
        f'<g><title>{said}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" '
        f'fill="{COLOURS[action.kind]}" fill-opacity="{opacity:.2f}" stroke="white"/>'
        f"{text if width >= LETTER * len(name) else ''}</g>\n"
    )


def _svg_feet(report: Report, y: int) -> str:
    """What the colours mean, and the last lines of the report."""
    kinds = sorted({timed.action.kind for own in report.timeline.timed for timed in own}, key=list(Kind).index)
    legend = "".join(
        f'<rect x="{LEFT + 150 * i}" y="{y}" width="10" height="10" fill="{COLOURS[kind]}"/>'
        f'<text x="{LEFT + 15 + 150 * i}" y="{y + 10}">{kind}: {NAMES[kind]}</text>\n'
        for i, kind in enumerate(kinds)
    )
    words = [
        f'<text x="8" y="{y + 30 + 16 * i}">{escape(line)}</text>\n' for i, line in enumerate(words_of(report)[2:])
    ]
    return legend + "".join(words)


def _png_of(report: Report) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timeline = report.timeline
    width = min(60.0, max(7.5, 0.3 * timeline.length / shortest(timeline)))
    figure, axes = pyplot.subplots(figsize=(width, 1.6 + 0.35 * timeline.grid.stages), layout="constrained")
    for timed in (timed for own in timeline.timed for timed in own):
        length = timed.stop - timed.start
        colour = COLOURS[timed.action.kind]
        axes.barh(timed.stage, length, 0.85, timed.start, color=colour, edgecolor="white")
        if length * width / timeline.length > 0.25:  # inches
            place = (timed.start + length / 2, timed.stage)
            name = label(timed.action, timeline.grid.chunks)
            axes.text(*place, name, ha="center", va="center", color="white", size=7)
    axes.set_yticks(range(timeline.grid.stages), [f"stage {stage}" for stage in range(timeline.grid.stages)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("\n".join(words_of(report)[:2]), loc="left", size=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    pyplot.close(figure)
    return content.getvalue()
