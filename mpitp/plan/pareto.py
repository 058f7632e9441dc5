"""The front of time and memory as a picture, by matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpitp.errors import UsageError
from mpitp.files import check_place, replace_by
from mpitp.plan.choice import Choice


def check_front(path: Path) -> None:
    """Raise UsageError or FileError, before anything is computed, where there will be no picture."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"--pareto {path}: the name must end in .svg or .png")
    if find_spec("matplotlib") is None:
        raise UsageError(
            f'--pareto {path} needs matplotlib: pip install "mpitp[plot]"; without --pareto the front is printed'
        )
    check_place(path, "draw to")


def draw_front(choice: Choice, path: Path) -> None:
    """Seconds of a step against memory a rank: the front, the fastest few, the user's own. Published by rename."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6))
    _draw(choice, figure)
    replace_by(path, lambda staging: figure.savefig(staging, format=path.suffix[1:], bbox_inches="tight"))


def _draw(choice: Choice, figure: Any) -> None:
    axes = figure.subplots()
    kinds = [("front", choice.found.front, "o-"), ("fastest", choice.found.best, "s")]
    kinds.append(("compared", [each.cost for each in choice.compared if each.cost], "x"))
    for label, costs, marker in kinds:
        if costs:
            points = [(cost.memory.total / 2**30, cost.seconds) for cost in costs]
            axes.plot(*zip(*points, strict=True), marker, label=label)
    for cost in choice.found.front:
        place = (cost.memory.total / 2**30, cost.seconds)
        axes.annotate(str(cost.layout), place, fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.axvline(choice.limit / 2**30, linestyle=":", color="gray", label="memory of a rank")
    axes.set_xlabel("memory a rank, GiB")
    axes.set_ylabel("seconds a step")
    axes.set_title(f"{choice.ranks} ranks of {choice.machine.machine.name}")
    axes.legend()
