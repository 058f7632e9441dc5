"""`verify`, or the check of types before it, finds planted faults of layouts and names layer and axis."""

from __future__ import annotations

import pytest

from examples.planted_layout_bugs import LAYOUT_FAULTS
from examples.planted_mixture_bugs import MIXTURE_FAULTS
from mpitp.errors import PlacementError
from mpitp.verify.report import summary
from tests.verify.layout_cases import run_layout

FAULTS = LAYOUT_FAULTS | MIXTURE_FAULTS
LAYOUTS = {str((f.mesh, f.site, f.training, f.model)): f for f in FAULTS.values()}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_placed(name: str) -> None:
    fault = FAULTS[name]
    with fault.planted():
        if "types" in fault.seen:
            with pytest.raises(PlacementError) as caught:
                run_layout(fault.model, fault.mesh, fault.site, **fault.training)
            assert str(caught.value).startswith(fault.seen["types"]) and f"along {fault.axis}" in str(caught.value)
            return
        report = run_layout(fault.model, fault.mesh, fault.site, **fault.training)
    print(summary(report, [], 0))
    found = {kind: report.first(kind) for kind in fault.seen}
    assert {kind: first and first.name for kind, first in found.items()} == fault.seen
    axes = [first.axis for first in found.values() if first is not None]
    assert not fault.axis or any(axis.startswith(f"{fault.axis}: ") for axis in axes), axes
    earlier = [kind for kind in ("start", "y") if kind not in fault.seen and "y" not in fault.seen]
    assert [report.first(kind) for kind in earlier] == [None] * len(earlier), "blamed on something before it"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_fault_all_is_equal(layout: str) -> None:
    fault = LAYOUTS[layout]
    report = run_layout(fault.model, fault.mesh, fault.site, **fault.training)
    assert report.ok, summary(report, [], 0)
