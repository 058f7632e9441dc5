"""Both model families against PyTorch and transformers on real MPI ranks: logits, losses, gradients, training, text."""

from __future__ import annotations

import pytest

from mpitp.comm import world_group
from tests.parity.golden_case import CASES, GOLDEN, compare, compare_training, golden_arrays, greedy, largest

pytestmark = pytest.mark.mpi


FEW_LATER = ["gemma3", "gpt-neox", "olmo2"]  # the others run on threads


@pytest.mark.parametrize("case", [*CASES, *FEW_LATER])
def test_matches_reference(case: str) -> None:
    group, golden = world_group(), golden_arrays(case)
    differences = compare(group, GOLDEN / case, golden) | compare_training(group, GOLDEN / case, golden)
    print(f"{case} on {group.size}: {largest(differences)}")
    assert {name: value for name, value in differences.items() if not value < 2e-10} == {}


@pytest.mark.parametrize("case", [*CASES, *FEW_LATER])
def test_greedy_continuation(case: str) -> None:
    golden = golden_arrays(case)
    assert greedy(world_group(), GOLDEN / case, golden) == golden["greedy"].tolist()
