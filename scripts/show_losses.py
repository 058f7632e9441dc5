"""Draw the losses of a run's metrics.jsonl as a small plot of text: python scripts/show_losses.py RUN_DIR."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 64, 12


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl, one a step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def plot(losses: list[float]) -> list[str]:
    """The curve as lines of text: each column is the mean of its share of the steps."""
    width = min(WIDTH, len(losses))
    cuts = [round(i * len(losses) / width) for i in range(width + 1)]
    columns = [sum(losses[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, high = min(columns), max(columns)
    rows = [round((high - value) / ((high - low) or 1.0) * (HEIGHT - 1)) for value in columns]
    lines = []
    for row in range(HEIGHT):
        label = f"{high - (high - low) * row / (HEIGHT - 1):6.2f}"
        lines.append(f"{label} |" + "".join("*" if at == row else " " for at in rows).rstrip())
    return [*lines, " " * 7 + "+" + "-" * width, " " * 8 + f"step 1{f'step {len(losses)}':>{width - 6}}"]


def main(run_dir: Path) -> None:
    """Print the plot, then first and last losses."""
    metrics = read_metrics(run_dir)
    colour, plain = ("\033[36m", "\033[0m") if sys.stdout.isatty() else ("", "")
    for line in plot([record["loss"] for record in metrics]):
        print(colour + line + plain)
    print(f"training loss  {metrics[0]['loss']:.3f} -> {metrics[-1]['loss']:.3f} nats a token")
    held_out = [(record["step"], record["valid_loss"]) for record in metrics if "valid_loss" in record]
    if held_out:
        (first, before), (last, after) = held_out[0], held_out[-1]
        print(f"held-out loss  {before:.3f} (step {first}) -> {after:.3f} (step {last})")
    seconds = sum(record["seconds"] for record in metrics)
    print(f"{sum(record['tokens'] for record in metrics) / seconds:,.0f} tokens a second over {seconds:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
