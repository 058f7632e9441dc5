"""The sweep's points, the terms of the fit against what a step really does, and the fit itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.bench import command, scaling
from mpitp.bench.products import attention_products, linear_products
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import UsageError
from mpitp.layers.site import make_site

WORDS = "scaling --layers 2 --hidden 24 --heads 3 --vocab 17 --ffn 10 --seq 5 --batch 2 --rounds 1".split()
WORDS += "--widths 12 --seqs 3 --batches 2 4".split()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([*WORDS, *words])


def test_points_are_the_base_and_one_change_each() -> None:
    found = scaling.points_of(parsed())
    expected = [(24, 5, 2), (12, 5, 2), (24, 3, 2), (24, 5, 4)]
    assert [(point.hidden, point.seq, point.batch) for point in found] == expected


@pytest.mark.parametrize("ranks, counts", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_rank_counts(ranks: int, counts: list[int]) -> None:
    assert scaling.rank_counts(ranks) == counts


def test_flops_are_those_of_the_products() -> None:
    """One query row a tile sees all keys up to its own: the products of whole tiles are an upper bound."""
    args = parsed()
    model = random_model(config_of(args, "gpt2", 5), make_site(SerialGroup()))
    work = scaling.work_of(model, scaling.Point(24, 5, 2), 1)
    linears = sum(product.flops for product in linear_products(model, 10))
    attention = sum(product.flops for product in attention_products(model, (5, 5)))
    assert work["flops"] - linears == attention * 6 // 10  # 15 of 25 pairs
    assert (work["calls"], work["bytes"]) == (0, 0)


def test_the_fit_finds_what_made_the_points() -> None:
    true = {"flops": 1e-10, "touched_bytes": 3e-10, "layers": 2e-4, "calls": 5e-5, "bytes": 1e-9}
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {term: float(rng.uniform(0.1, 1) * 1e-2 / true[term]) for term in scaling.TERMS} for _ in range(12)
    ]
    for row in rows:
        row["seconds"] = scaling.predict(row, true)
    assert scaling.fit(rows) == pytest.approx(true)


def test_terms_that_would_be_negative_or_never_occur_are_zero() -> None:
    rows = [
        {"flops": 10.0 * k, "touched_bytes": 1.0, "layers": k * k, "calls": 0, "bytes": 0, "seconds": 20.0 * k - 1}
        for k in range(1, 8)
    ]
    found = scaling.fit(rows)
    assert min(found.values()) == 0 and found["calls"] == found["bytes"] == 0
    assert found["flops"] > 0


def test_every_rank_tells_the_same_points() -> None:
    def check(group: Group) -> dict[str, Any]:
        return scaling.measure(parsed(), group)

    facts, *others = run_threads(3, check)
    assert all(other["points"] == facts["points"] for other in others)
    assert [row["ranks"] for row in facts["points"]] == [1] * 4 + [2] * 4 + [3] * 4
    assert [row["calls"] > 0 for row in facts["points"]] == [False] * 4 + [True] * 8
    assert len(scaling.report(facts)) == 3 + 12 + 2 + len(scaling.TERMS) + 1


def test_the_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("--out", str(tmp_path / "table.json"))) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table["points"]) == 4 and set(table["seconds_per"]) == set(scaling.TERMS)
    assert "relative error" in capsys.readouterr().out


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(UsageError, match="--widths must be at least 1 each"):
        command.run(parsed("--widths", "0"))
