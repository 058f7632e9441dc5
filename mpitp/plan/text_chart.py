"""A pipeline's timeline in letters: a row a stage."""

from __future__ import annotations

from mpitp.pipeline.actions import Action, Kind
from mpitp.pipeline.simulate import Timed, Timeline

FILL = {Kind.FORWARD: "=", Kind.BACKWARD: "-", Kind.INPUT_GRAD: "-", Kind.WEIGHT_GRAD: "~"}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradients",
    Kind.WEIGHT_GRAD: "weight gradients",
}
MOST_COLUMNS = 5  # of the shortest action: wider ones are no clearer
LEAST_COLUMNS = 16  # of the whole chart, however narrow the terminal


def text_chart(timeline: Timeline, columns: int) -> str:
    """The chart, within `columns`; each action is as wide as it is long and begins with its name where that fits."""
    stages = timeline.grid.stages
    margin = len(str(stages - 1))
    held = max(len(str(max(timeline.in_flight))), len("held"))
    room = max(LEAST_COLUMNS, columns - margin - held - len(" || "))
    scale = _columns_per_time(timeline, room)
    width = round(timeline.length * scale)
    rows = [
        f"{stage:>{margin}} |{_row(own, scale, width, timeline.grid.chunks)}| {timeline.in_flight[stage]:>{held}}"
        for stage, own in enumerate(timeline.timed)
    ]
    end = f"{timeline.length:g}"
    head = f"{'':{margin}}  0{end:>{max(width - 1, len(end) + 1)}}  {'held':>{held}}"
    return "\n".join([head, *rows, _legend(timeline)])


def _legend(timeline: Timeline) -> str:
    """What the letters of this chart mean."""
    kinds = {timed.action.kind for own in timeline.timed for timed in own}
    chunks = ["a, b: chunks"] if timeline.grid.chunks > 1 else []
    return ", ".join([*(f"{kind} {NAMES[kind]}" for kind in Kind if kind in kinds), *chunks])


def label(action: Action, chunks: int) -> str:
    """F3 for the forward of microbatch 3; F3a and F3b where a stage has chunks."""
    chunk = chr(ord("a") + action.chunk) if 1 < chunks <= 26 else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def shortest(timeline: Timeline) -> float:
    """The shortest time of an action that takes any."""
    return min(timed.stop - timed.start for own in timeline.timed for timed in own if timed.stop > timed.start)


def _columns_per_time(timeline: Timeline, room: int) -> float:
    """Whole columns for the shortest action where there is room: what takes as long then looks as long."""
    unit = shortest(timeline)
    columns = room * unit / timeline.length
    return (min(MOST_COLUMNS, int(columns + 1e-9)) if columns >= 1 else columns) / unit


def _row(own: list[Timed], scale: float, width: int, chunks: int) -> str:
    row = [" "] * width
    for timed in own:
        start, stop = round(timed.start * scale), round(timed.stop * scale)
        row[start:stop] = _cell(timed.action, stop - start, chunks)
    return "".join(row)


def _cell(action: Action, width: int, chunks: int) -> str:
    """The longest name that leaves a cell's end to be seen, and filling."""
    names = (label(action, chunks), f"{action.kind}{action.microbatch}", str(action.kind), "")
    name = next(name for name in names if len(name) <= max(width, 0))
    return name.ljust(width, FILL[action.kind])
