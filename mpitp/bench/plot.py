"""Pictures of what `mpitp bench` measured, for `--plot out.png` (the suffix says which kind of file)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpitp.errors import UsageError
from mpitp.files import replace_by

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#9aa5b1", "#cc79a7", "#e69f00")  # Okabe and Ito's


def check_plot(path: str) -> None:
    """Raise UsageError before anything is measured when there will be no picture."""
    if find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib, which is not installed: pip install "mpitp[plot]"')
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {Path(path).resolve().parent}")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: the name must end in .png, .svg or .pdf")


def draw(what: str, facts: dict[str, Any], path: str) -> None:
    """The picture of one benchmark's numbers, published by rename."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    DRAWINGS[what](axes, facts)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    replace_by(Path(path), lambda staging: figure.savefig(staging, format=Path(path).suffix[1:], dpi=150))
    pyplot.close(figure)


def _train(axes: Any, facts: dict[str, Any]) -> None:
    """Where the step's time goes, and the floor beside it."""
    parts = {name: 1e3 * seconds for name, seconds in facts["profile"].items() if name != "total"}
    axes.barh(list(parts), list(parts.values()), color=COLOURS[0])
    axes.invert_yaxis()
    floor = 1e3 * facts["floor_seconds"]["least"]
    axes.axvline(floor, color=COLOURS[1], linestyle="--", label=f"all matrix products alone: {floor:.0f} ms")
    axes.set_xlabel("ms of a step")
    axes.set_title(f"step / floor {facts['step_to_floor']['least']:.2f}", loc="left")
    axes.legend(frameon=False)


def _decode(axes: Any, facts: dict[str, Any]) -> None:
    """Tokens per second of ours, the peer and the bound."""
    rows = facts["batches"]
    bars = {"mpitp": [row["tokens_per_second"]["best"] for row in rows]}
    bars["weights read once a step"] = [row["batch"] / facts["bound_seconds"]["least"] for row in rows]
    if "against" in facts:
        bars[facts["against"]["peer"]] = [row["tokens_per_second"]["best"] for row in facts["against"]["batches"]]
    width = 0.8 / len(bars)
    for index, (name, speeds) in enumerate(bars.items()):
        axes.bar([place + index * width for place in range(len(rows))], speeds, width, label=name, color=COLOURS[index])
    middle = width * (len(bars) - 1) / 2
    axes.set_xticks([place + middle for place in range(len(rows))], [f"batch {row['batch']}" for row in rows])
    axes.set_ylabel("tokens/s")
    axes.legend(frameon=False)


def _allreduce(axes: Any, facts: dict[str, Any]) -> None:
    """Microseconds by size of every way."""
    sizes = [row["bytes"] for row in facts["sizes"]]
    for index, way in enumerate(facts["ways"]):
        seconds = [1e6 * row["ways"][way]["least_seconds"] for row in facts["sizes"]]
        axes.loglog(sizes, seconds, "o-", label=way, color=COLOURS[index], base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlabel("bytes")
    axes.set_ylabel("us, least")
    axes.set_title(f"{facts['collective']}, {facts['machine']['ranks']} ranks", loc="left")
    axes.legend(frameon=False)


def _scaling(axes: Any, facts: dict[str, Any]) -> None:
    """Measured against fitted seconds."""
    counts = sorted({row["ranks"] for row in facts["points"]})
    for index, count in enumerate(counts):
        rows = [row for row in facts["points"] if row["ranks"] == count]
        fitted, measured = [row["fitted_seconds"] for row in rows], [row["seconds"] for row in rows]
        axes.loglog(
            fitted, measured, "o", label=f"{count} rank{'s' * (count > 1)}", color=COLOURS[index % len(COLOURS)]
        )
    limits = [min(row["seconds"] for row in facts["points"]), max(row["seconds"] for row in facts["points"])]
    axes.loglog(limits, limits, color=COLOURS[3], linestyle="--", label="as fitted")
    axes.set_xlabel("fitted seconds of a step")
    axes.set_ylabel("measured seconds")
    axes.legend(frameon=False)


DRAWINGS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "train": _train,
    "decode": _decode,
    "allreduce": _allreduce,
    "scaling": _scaling,
}
