"""Machine files: they come back as they were written, and what is missing or absurd is one message."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mpitp.errors import ConfigError
from mpitp.plan.machine_file import (
    Machine,
    along,
    between_rows,
    machine_from,
    read_machine,
    sum_rate,
    write_machine,
)  # fmt: skip

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "machines").glob("*.toml"))


def example(name: str = "ethernet_cpu") -> dict[str, Any]:
    path = next(path for path in EXAMPLES if path.stem == name)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def changed(name: str, value: Any) -> dict[str, Any]:
    section, key = name.split(".")
    tables = example()
    tables[section] = {**tables.get(section, {}), key: value}
    return tables


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_machine_comes_back_as_it_was_written(path: Path, tmp_path: Path) -> None:
    machine = read_machine(path)
    write_machine(machine, tmp_path / "machine.toml")
    assert read_machine(tmp_path / "machine.toml") == machine
    assert [entry.name for entry in tmp_path.iterdir()] == ["machine.toml"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("in_node.latency_seconds", 25.0, "in_node.latency_seconds = 25.0: expected a finite number from 0 to 1"),
        ("in_node.overlap", 1.5, "from 0 to 1"),
        ("compute.exps_per_second", -1.0, "compute.exps_per_second = -1.0"),
        ("compute.exps_per_second", math.nan, "compute.exps_per_second = nan"),
        ("compute.passes", [], r"compute.passes is empty"),
        ("compute.passes", [[1e8]], "of 2 each"),
        ("compute.passes", [[1e8, "fast"]], "a list of rows of numbers"),
        ("products.float32", [[64, 64, 64, 5.0]], "a rate from 1e\\+06 to 1e\\+17"),
        ("products.float32", [[0, 64, 64, 1e9]], "sizes of at least 1"),
        ("attention.float32", [[16, 64, -1.0, 1e9]], "at the end 2 rates from 100000 to"),
        ("attention.float32", [[16, 64, 1e9]], "of 4 each"),
        ("compute.added_row_seconds", -1.0, "compute.added_row_seconds = -1.0"),
        ("in_node.sums", [[1, 1e6, 1e9]], "the first from 2 on"),
        ("machine.memory_bytes", 32, "machine.memory_bytes = 32: expected a finite number from"),
        ("machine.ranks_per_node", 0, "machine.ranks_per_node = 0"),
        ("machine.ranks_per_nodes", 8, 'did you mean "ranks_per_node"'),
        ("between_nodes.sums", [[2, 1e6, math.inf]], "between_nodes.sums"),
    ],
)
def test_an_absurd_number_is_named_with_what_was_expected(name: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        machine_from(changed(name, value))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    tables = example()
    with pytest.raises(ConfigError, match=r"\[compute\] is missing"):
        machine_from({name: table for name, table in tables.items() if name != "compute"})
    with pytest.raises(ConfigError, match="in_node.latency_seconds is missing: of one message"):
        machine_from({**tables, "in_node": {"sums": [[2, 1e6, 1e9]]}})
    with pytest.raises(ConfigError, match="products has no row"):
        machine_from({**tables, "products": {}})
    with pytest.raises(ConfigError, match="no network of this kind"):
        machine_from({**tables, "network": {}})
    (tmp_path / "bad.toml").write_text("[machine", encoding="utf-8")
    for path, told in ((tmp_path / "bad.toml", "is not a TOML file"), (tmp_path / "none.toml", "can't read")):
        with pytest.raises(ConfigError, match=told):
            read_machine(path)


def test_rates_are_the_rows_own_and_stay_between_them() -> None:
    machine = machine_from(example())
    rows = machine.products.float32
    for m, n, k, rate in rows:
        assert between_rows(rows, (m, n, k)) == rate
    assert rows[0][-1] < between_rows(rows, (60, 60, 60)) < rows[-1][-1]
    assert between_rows(rows, (1e9, 1e9, 1e9)) <= max(row[-1] for row in rows)
    assert along(((1.0, 1.0), (100.0, 100.0)), 10.0) == pytest.approx(10.0)
    assert along(((1.0, 3.0), (100.0, 5.0)), 1e6) == 5.0
    assert sum_rate(machine.in_node.sums, 2, 1e6) == pytest.approx(6e9)
    with pytest.raises(ConfigError, match="no products.float16, but the model is of dtype float16 .it has float32"):
        machine.products.of("float16")


def test_a_sum_over_nodes_goes_through_their_links() -> None:
    machine: Machine = machine_from(example())
    size = 1e8
    alone = machine.sum_seconds(size, 16)
    assert alone == pytest.approx(4 * 2e-6 + size / 6e8)
    assert machine.sum_seconds(size, 16, 2) == pytest.approx(alone + 3e-5 + size / 1.1e9)  # one sum at a time
    assert machine.sum_seconds(size, 1, 2) == pytest.approx(3e-5 + 16 * size / 1.1e9)  # sixteen share the link
    assert machine.sum_seconds(size, 16, share=0.5) == pytest.approx(4 * 2e-6 + size / 1.2e9)
    lonely = machine_from({name: table for name, table in example().items() if name != "between_nodes"})
    with pytest.raises(ConfigError, match="one node of 16 ranks and has no .between_nodes."):
        lonely.sum_seconds(size, 16, 2)
