"""`verify` finds planted faults, one at a time, and names the layer; without one it finds nothing."""

from __future__ import annotations

import pytest

from examples.planted_bugs import FAULTS
from mpitp.verify.report import summary
from tests.verify.cases import CONFIGS, run_verify

CASES = [
    pytest.param(name, model, ranks, id=f"{name}, {model} on {ranks}")
    for name, fault in FAULTS.items()
    for model in fault.models
    for ranks in (2, 3)
    if fault.ranks[0] <= ranks <= fault.ranks[1]
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("model", CONFIGS)
def test_without_a_fault_all_is_equal(model: str, ranks: int, dtype: str) -> None:
    report = run_verify(model, ranks, 2, dtype)
    assert report.ok, summary(report, [], ranks)
    assert len(report.rows) > 50


def check(name: str, model: str, ranks: int, dtype: str) -> None:
    fault = FAULTS[name]
    with fault.planted():
        report = run_verify(model, ranks, int("update" in fault.seen), dtype)
    print(summary(report, [], ranks))
    assert not report.ok
    for kind, place in fault.seen.items():
        first = report.first(kind)
        assert first is not None and first.name == place, kind
    earlier = [kind for kind in ("start", "y") if kind not in fault.seen and "y" not in fault.seen]
    assert [report.first(kind) for kind in earlier] == [None] * len(earlier), "blamed on something before it"


@pytest.mark.parametrize(("name", "model", "ranks"), CASES)
def test_fault_is_found_and_named(name: str, model: str, ranks: int) -> None:
    check(name, model, ranks, "float64")


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_named_in_float32(name: str) -> None:
    """The wider tolerance hides none of them."""
    check(name, FAULTS[name].models[0], 2, "float32")


def test_planted_faults_are_gone_afterwards() -> None:
    for fault in FAULTS.values():
        with fault.planted():
            pass
    assert run_verify("gpt2", 2).ok and run_verify("llama", 2).ok
