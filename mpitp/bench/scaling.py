r"""`mpitp bench scaling`: how a training step's time grows with width, sequence, batch and ranks, and a fit of it.

    seconds = flops / rate + touched bytes / memory speed + layers * overhead + calls * latency + bytes / bandwidth

"flops" are those of a rank's own matrix products, "touched bytes" those of its activations (rows times the widths that
it computes), "calls" and "bytes" its collectives by the closed form. The five numbers are fitted to all points at once,
so that relative errors are least and none is negative; a term that the points can't tell from noise becomes zero.
The ranks of the job at hand give the counts 1, 2, 4, ... and all of them; while few measure, the others wait.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.bench.machine import machine_facts
from mpitp.bench.products import linear_weights
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of
from mpitp.bench.timing import CLOCKS, clocked, take_turns
from mpitp.bench.traffic import step_traffic
from mpitp.bench.train import batch_to_time, step_of
from mpitp.comm.group import Group
from mpitp.files import replace_file
from mpitp.layers.site import make_site
from mpitp.models.model import CausalLM

TERMS = ("flops", "touched_bytes", "layers", "calls", "bytes")
UNITS = {
    "flops": ("compute", "GFLOP/s", 1e-9),
    "touched_bytes": ("memory", "GB/s", 1e-9),
    "layers": ("overhead a layer", "us", 1e6),
    "calls": ("latency a collective", "us", 1e6),
    "bytes": ("bandwidth of collectives", "GB/s", 1e-9),
}
RATES = ("flops", "touched_bytes", "bytes")  # told as so much a second; the others as seconds each


@dataclass(frozen=True, slots=True)
class Point:
    """One size of the sweep."""

    hidden: int
    seq: int
    batch: int


def points_of(args: argparse.Namespace) -> list[Point]:
    """The base size, and every other value of width, sequence and batch with the rest of the base."""
    base = Point(args.hidden, args.seq, args.batch)
    found = [base]
    found += [Point(hidden, base.seq, base.batch) for hidden in args.widths]
    found += [Point(base.hidden, seq, base.batch) for seq in args.seqs]
    found += [Point(base.hidden, base.seq, batch) for batch in args.batches]
    return list(dict.fromkeys(found))


def rank_counts(ranks: int) -> list[int]:
    """1, 2, 4, ... and `ranks`."""
    return sorted({2**i for i in range(ranks.bit_length())} | {ranks})


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All points at all rank counts, and the fit; equal on every rank. Rank 0 writes `--out`."""
    rows: list[dict[str, Any]] = []
    for count in rank_counts(group.size):
        part = first_ranks(group, count)
        rows += group.broadcast_object(_measure_ranks(args, part) if part is not None else None)
    coefficients = fit(rows)
    for row in rows:
        row["fitted_seconds"] = predict(row, coefficients)
    errors = [abs(row["fitted_seconds"] / row["seconds"] - 1) for row in rows]
    return {
        "machine": machine_facts(group),
        "model": {"type": args.model, "layers": args.layers, "heads": args.heads, "vocab": args.vocab},
        "rounds": args.rounds,
        "points": rows,
        "seconds_per": coefficients,
        "relative_error": {"median": float(np.median(errors)), "largest": max(errors)},
    }


def first_ranks(group: Group, count: int) -> Group | None:
    """The group of ranks 0 .. count - 1; None on the other ranks."""
    if count == group.size:
        return group
    part = group.split(int(group.rank >= count), group.rank)
    return part if group.rank < count else None


def _measure_ranks(args: argparse.Namespace, group: Group) -> list[dict[str, Any]]:
    tasks, facts = {}, {}
    for point in points_of(args):
        config = config_of(argparse.Namespace(**{**vars(args), "hidden": point.hidden}), args.model, point.seq)
        model = random_model(config, make_site(group, dtype=args.dtype))
        batch = batch_to_time(config, point.batch, point.seq)
        name = str(point)
        tasks[name] = clocked(step_of(model, batch), CLOCKS["wall"])
        facts[name] = {
            "ranks": group.size,
            "hidden": point.hidden,
            "seq": point.seq,
            "batch": point.batch,
            **work_of(model, point, group.size),
        }
    samples = take_turns(tasks, args.rounds, group, f"bench scaling: {group.size} ranks")
    return [
        {**facts[name], "seconds": samples.least(name), "median_seconds": samples.median(name)}
        for name in samples.seconds
    ]


def work_of(model: CausalLM, point: Point, ranks: int) -> dict[str, int]:
    """The terms of the fit: what this rank computes, touches and communicates in a step."""
    config, tokens = model.config, point.seq * point.batch
    weights = list(linear_weights(model))
    heads = model.site.heads(config.heads, config.kv_heads).query.size
    pairs = point.batch * point.seq * (point.seq + 1) // 2  # of a query and a key that it sees
    pieces = model.site.summation().pieces((tokens, config.hidden_size), model.dtype.itemsize)
    traffic = step_traffic(config, ranks, tokens, model.dtype.itemsize, pieces=len(pieces))
    return {
        "flops": 6 * tokens * sum(w.size for w in weights) + 14 * pairs * config.head_dim * heads * config.num_layers,
        "touched_bytes": tokens * sum(sum(w.shape) for w in weights) * model.dtype.itemsize,
        "layers": config.num_layers,
        "calls": sum(row.calls for row in traffic),
        "bytes": sum(row.total_bytes for row in traffic),
    }


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds per unit of every term: least squares of relative errors; terms that come out negative are left out."""
    seconds = np.array([row["seconds"] for row in rows])
    table = np.array([[row[term] for term in TERMS] for row in rows], np.float64) / seconds[:, None]
    scale = table.max(axis=0)
    kept = [index for index in range(len(TERMS)) if scale[index]]
    solution = np.zeros(0)
    while kept:
        solution = np.linalg.lstsq(table[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if (solution >= 0).all():
            break
        kept.pop(int(solution.argmin()))
    found = dict.fromkeys(TERMS, 0.0)
    for index, value in zip(kept, solution, strict=True):
        found[TERMS[index]] = float(value / scale[index])
    return found


def predict(row: dict[str, Any], coefficients: dict[str, float]) -> float:
    """Seconds by the fit."""
    return float(sum(row[term] * coefficients[term] for term in TERMS))


def write_table(facts: dict[str, Any], path: str) -> None:
    """All points and the fit as JSON."""
    import json

    replace_file(Path(path), json.dumps(facts, indent=2) + "\n")


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    model, error = facts["model"], facts["relative_error"]
    lines = [
        f"{model['type']}, {model['layers']} layers, {model['heads']} heads, vocabulary {model['vocab']}; a step",
        "",
    ]
    titles = ("ranks", "hidden", "seq", "batch", "least ms", "median ms", "fitted ms", "tokens/s")
    lines.append("".join(f"{title:>11}" for title in titles))
    for row in facts["points"]:
        lines.append(
            f"{row['ranks']:>11}{row['hidden']:>11}{row['seq']:>11}{row['batch']:>11}{1e3 * row['seconds']:>11.1f}"
            f"{1e3 * row['median_seconds']:>11.1f}{1e3 * row['fitted_seconds']:>11.1f}"
            f"{row['seq'] * row['batch'] / row['seconds']:>11.0f}"
        )
    lines += ["", "fitted: seconds = " + " + ".join(UNITS[term][0] for term in TERMS)]
    for term, seconds in facts["seconds_per"].items():
        name, unit, factor = UNITS[term]
        value = factor / seconds if term in RATES and seconds else factor * seconds
        told = f"{value:10.2f} {unit}" if seconds else "         - not seen in these points"
        lines.append(f"  {name:26}{told}")
    lines.append(f"relative error: median {100 * error['median']:.1f} %, largest {100 * error['largest']:.1f} %")
    if len(facts["points"]) <= len(TERMS):
        lines.append(f"{len(facts['points'])} points for {len(TERMS)} numbers: any fit meets them; give it more sizes")
    return lines
