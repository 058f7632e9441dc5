"""Draw the losses of the runs that scripts/plot_layouts made, and how they differ from those on one rank.

usage: python scripts/draw_layouts.py FOLDER OUT.png        FOLDER holds RANKS-false and RANKS-true for 1, 2, 3, 4 ranks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

RANKS = (1, 2, 3, 4)
COLOURS = {1: "#9aa5b1", 2: "#0072b2", 3: "#d55e00", 4: "#009e73"}  # Okabe and Ito's, told apart by every eye
# Curves that lie on one another: the first is broad, the later ones narrow and dashed in turn, so that all are seen.
STYLES: dict[int, dict[str, Any]] = {
    1: {"linewidth": 5.5, "solid_capstyle": "round"},
    2: {"linewidth": 2.4},
    3: {"linewidth": 2.4, "dashes": (4, 8)},
    4: {"linewidth": 2.4, "dashes": (4, 8), "dash_offset": 6},
}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#6b7280",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#374151",
    "ytick.color": "#374151",
}
MICRO = 1e6  # differences are drawn in millionths of a nat


def read_losses(run_dir: Path) -> list[float]:
    """The loss of every step."""
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def draw_curves(axes: Any, losses: dict[int, list[float]], title: str) -> None:
    """The four curves, one on the other."""
    for ranks in RANKS:
        style = dict(STYLES[ranks])
        dashes, offset = style.pop("dashes", None), style.pop("dash_offset", 0)
        if dashes:
            style["linestyle"] = (offset, dashes)
        axes.plot(range(1, len(losses[ranks]) + 1), losses[ranks], color=COLOURS[ranks], **style)
    axes.set_title(title, loc="left", fontweight="bold", pad=10)


def draw_differences(axes: Any, losses: dict[int, list[float]]) -> float:
    """Each curve less that of one rank; returns the largest difference."""
    largest = 0.0
    for ranks in RANKS[1:]:
        differences = [a - b for a, b in zip(losses[ranks], losses[1], strict=True)]
        largest = max(largest, *map(abs, differences))
        axes.plot(range(1, len(differences) + 1), [MICRO * d for d in differences], color=COLOURS[ranks], linewidth=1.1)
    axes.set_xlabel("step")
    return largest


def main(folder: Path, picture: Path) -> None:
    """Two columns: plain and invariant. Above the losses, below the differences."""
    runs = {kind: {n: read_losses(folder / f"{n}-{kind}") for n in RANKS} for kind in ("false", "true")}
    titles = {"false": "Plain: equal but for rounding", "true": "Invariant mode: equal to the last bit"}
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            2, 2, figsize=(9, 5.2), sharex=True, sharey="row", height_ratios=(1.7, 1), layout="constrained"
        )
        for column, (kind, losses) in enumerate(runs.items()):
            draw_curves(grid[0][column], losses, titles[kind])
            largest = draw_differences(grid[1][column], losses)
            rounding = f"at most {largest:.0e} nats: rounding, which training makes grow"
            said = rounding if largest else "exactly 0 at every step and rank count"
            grid[1][column].set_title(said, loc="left", fontsize=9.5, color="#374151")
            grid[1][column].xaxis.set_major_locator(MaxNLocator(5, integer=True))
        grid[0][0].set_ylabel("loss (nats a token)")
        grid[1][0].set_ylabel("minus one rank's\n(millionths)")
        handles = [Line2D([], [], color=COLOURS[n], linewidth=STYLES[n]["linewidth"]) for n in RANKS]
        names = [f"{n} rank{'s' * (n > 1)}" for n in RANKS]
        grid[0][1].legend(handles, names, frameon=False, loc="upper right", handlelength=2.5)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=120)
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
