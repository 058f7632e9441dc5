"""Write mpitp/step/web/layouts.json: what the stepper's page tells of layouts, by the cost function of `mpitp plan`.

    python scripts/layout_table.py

For each machine (the two of examples/machines, the Ethernet one also at a tenth and ten times of its link's rate), each
size of a GPT-2 and each number of ranks: every layout of tp, pp and dp (with ZeRO-1 beside replicas), its memory a rank
and the seconds of a step by part. The page looks numbers up and computes none; a test holds the file to this script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitp.models import config_from_hf
from mpitp.plan.anatomy import Anatomy, Facts
from mpitp.plan.cost import Step, StepCost, cost_of
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine, read_machine

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "mpitp" / "step" / "web" / "layouts.json"
SEQUENCES, TOKENS = 64, 512
RANKS = (1, 2, 4, 8, 16, 32, 64)
MODELS = ((768, 12, 12), (1536, 16, 24), (2560, 32, 32))  # width, heads, blocks
PARTS = {  # what the page tells together
    "a rank's own work": (
        "products",
        "attention",
        "passes",
        "exponentials",
        "starts",
        "recompute",
        "start of the step",
    ),
    "sums over tp": ("sums over tp", "exchange over cp", "exchange over ep"),
    "bubble of pp": ("bubble",),
    "sums over replicas": ("sums over replicas", "tied tables"),
    "optimizer": ("optimizer",),
}


def machines() -> dict[str, Machine]:
    """By what the page calls them."""
    ethernet, fat = (
        read_machine(ROOT / "examples" / "machines" / f"{name}.toml") for name in ("ethernet_cpu", "fat_tree_gpu")
    )
    speeds = {"1 Gbit/s": 0.1, "10 Gbit/s": 1.0, "100 Gbit/s": 10.0}
    named = {f"16 cores a node, {rate}": with_links(ethernet, factor) for rate, factor in speeds.items()}
    return {**named, "8 GPUs a node, fat tree": fat}


def with_links(machine: Machine, factor: float) -> Machine:
    """With links between nodes that carry so many times as much."""
    wide = machine.between_nodes
    assert wide is not None
    sums = tuple((ranks, size, rate * factor) for ranks, size, rate in wide.sums)
    faster = replace(wide, sums=sums, send_bytes_per_second=wide.send_bytes_per_second * factor)
    return replace(machine, between_nodes=faster)


def layouts(ranks: int, heads: int, blocks: int) -> Iterator[Layout]:
    """Every way to make so many ranks of tp, pp and dp."""
    for tp in (n for n in RANKS if ranks % n == 0 and n <= heads):
        for pp in (n for n in RANKS if ranks % (tp * n) == 0 and n <= blocks):
            dp = ranks // tp // pp
            if dp * pp <= SEQUENCES:
                yield Layout(tp=tp, pp=pp, dp=dp, zero=int(dp > 1))


def anatomy_of(machine: Machine, model: tuple[int, int, int]) -> Anatomy:
    """Of a GPT-2 of a size, in float32."""
    width, heads, blocks = model
    fields = {"model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": blocks, "n_positions": TOKENS}
    return Anatomy(Facts(config_from_hf(fields | {"vocab_size": 50257}), "float32", TOKENS), machine)


def row_of(cost: StepCost) -> list[Any]:
    """tp, pp, dp, bytes a rank, seconds of each of `PARTS`."""
    layout = cost.layout
    parts = [sum(cost.parts[name] for name in names) for names in PARTS.values()]
    shown = [cost.memory.total, *(part if part > 1e-9 else 0.0 for part in parts)]  # a bubble of rounding is none
    return [layout.tp, layout.pp, layout.dp, *(float(f"{x:.4g}") for x in shown)]


def rows_of(anatomy: Anatomy, model: tuple[int, int, int], ranks: int) -> list[list[Any]]:
    """The fastest first."""
    costs = [cost_of(anatomy, Step(SEQUENCES), layout) for layout in layouts(ranks, *model[1:])]
    return [row_of(cost) for cost in sorted(costs, key=lambda cost: cost.seconds)]


def table() -> dict[str, Any]:
    """All of it."""
    found = machines()
    return {
        "machines": [
            {"name": name, "memory": each.machine.memory_bytes, "per_node": each.machine.ranks_per_node}
            for name, each in found.items()
        ],
        "models": [f"{blocks} blocks of width {width}, {heads} heads" for width, heads, blocks in MODELS],
        "ranks": list(RANKS),
        "parts": list(PARTS),
        "step": f"{SEQUENCES} sequences of {TOKENS} tokens",
        "rows": [
            [
                [rows_of(anatomy, model, ranks) for ranks in RANKS]
                for model in MODELS
                for anatomy in [anatomy_of(on, model)]
            ]
            for on in found.values()
        ],
    }


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{TABLE.relative_to(ROOT)}: {TABLE.stat().st_size} bytes")
