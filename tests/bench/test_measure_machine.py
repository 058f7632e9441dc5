"""`mpitp bench machine`: a whole and sensible machine file from two ranks, and what it refuses."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import pytest

from mpitp.bench.machine_parts import starts_of, starts_of_tiny_model
from mpitp.bench.measure_machine import Effort, measure, ranks_on_nodes, report
from mpitp.bench.timing import Samples
from mpitp.cli import main
from mpitp.comm import Group, run_threads
from mpitp.errors import UsageError
from mpitp.plan.machine_file import machine_from
from mpitp.plan.work import Both, Work

ARGS = argparse.Namespace(seconds=0.2, most_bytes=1 << 16, dtype=["float64", "float32"], name="two threads")


def test_threads_measure_a_file_that_plans_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: Group) -> dict[str, object]:
        return measure(ARGS, group)

    first, second = run_threads(2, rank)
    assert first["file"] == second["file"]
    machine = machine_from(tomllib.loads(first["file"]))
    assert machine.machine.name == "two threads" and machine.machine.ranks_per_node == 2
    assert machine.between_nodes is None and machine.most_ranks == 2
    assert {int(row[0]) for row in machine.in_node.sums} == {2}
    assert all(row[1] <= 1 << 16 for row in machine.in_node.sums)
    assert machine.products.float64 and machine.products.float32 and not machine.products.bfloat16
    assert machine.attention is not None and machine.attention.float64 and not machine.attention.bfloat16
    assert 0 <= machine.compute.added_row_seconds < 0.1
    assert 0 < machine.compute.operation_seconds < 0.1
    assert report(first)[0] == "1 node of 2 ranks"


def test_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads as two hosts of two: sums of each level, and links."""
    gather = "mpitp.bench.measure_machine.ranks_on_nodes"
    monkeypatch.setattr(gather, lambda hosts: (2, 2))
    found = run_threads(4, lambda group: measure(argparse.Namespace(**{**vars(ARGS), "dtype": None}), group))
    machine = machine_from(tomllib.loads(found[3]["file"]))
    assert machine.between_nodes is not None and 1 <= machine.between_nodes.links <= 2
    assert machine.machine.ranks_per_node == 2 and machine.sum_seconds(1e6, 2, 2) > 0


def test_one_rank_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitp.bench.measure_machine.ranks_on_nodes", lambda hosts: (1, 2))
    found = run_threads(2, lambda group: measure(argparse.Namespace(**{**vars(ARGS), "dtype": None}), group))
    machine = machine_from(tomllib.loads(found[0]["file"]))
    assert machine.between_nodes is not None and machine.machine.ranks_per_node == 1


def test_calls_in_turn_with_something_else_keep_the_least_of_all() -> None:
    def rank(group: Group) -> tuple[list[float], list[float]]:
        effort = Effort(0.0, 1 << 16)
        times = iter([9.0, 9.0, 9.0, 4.0, 5.0, 6.0, 9.0, 9.0, 9.0, 3.0, 5.0, 6.0])
        first = effort.samples({"task": lambda: next(times)}, group, "a task").seconds["task"]
        return first, effort.samples({"task": lambda: next(times)}, group, "a task").seconds["task"]

    first, both = run_threads(1, rank)[0]
    assert len(both) == 2 * len(first) and min(both) < min(first)


def test_nodes_are_filled_alike() -> None:
    assert ranks_on_nodes(["a", "a", "b", "b"]) == (2, 2)
    assert ranks_on_nodes(["a"] * 3) == (3, 1)
    for hosts in (["a", "b", "a", "b"], ["a", "a", "b"]):
        with pytest.raises(UsageError, match="start as many ranks on each host"):
            ranks_on_nodes(hosts)


def test_starts_follow_from_what_a_block_more_takes() -> None:
    """A machine on which each start takes 2 us and a step 1 ms, told from the times that it would have."""
    work = Both(Work(((1, 1, 1, 3.0),), (5, 0), starts=2.0), Work(passes=(1,)), Work())
    assert starts_of(work) == 3 + 1 + 2 + 1
    attention = {"forward 8 8": [0.25], "backward 8 8": [0.5]}
    times = {"passes 2": [0.0], "passes 6": [4.0 + 4 * 0.75], "step": [1e-3]}
    one = starts_of_tiny_model(Samples(times | attention))[0]
    times = {"passes 2": [5e-3], "passes 6": [5e-3 + 4 * (0.75 + 2e-6 / one)], "step": [6e-3]}
    found = starts_of_tiny_model(Samples(times | attention))
    assert found == pytest.approx((2e-6, 1e-3))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "mpitp launch -n 2 -- bench machine"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--most-bytes", "5"], "--most-bytes must be at least 65536"),
        (["--out", "/nowhere/machine.toml"], "there is no folder"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "machine", *words]) == 2
    assert told in capsys.readouterr().err
