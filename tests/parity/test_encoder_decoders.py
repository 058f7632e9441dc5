"""T5, BART and Marian against PyTorch and transformers, tensor by tensor, on 1 to 7 ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.comm import run_threads
from mpitp.ops.relative_buckets import Buckets
from tests.parity.encoder_decoder_case import PAIR_CASES, PAIRS, compare_pairs, compare_texts
from tests.parity.golden_case import largest

TOLERANCE = 1e-11  # float64; what is seen is about 1e-15, in training losses 1e-12
RUNS = [(case, ranks) for case in ("t5", "bart") for ranks in (1, 2, 3, 4, 5, 7)]
RUNS += [(case, ranks) for case in ("t5-gated", "marian") for ranks in (1, 3, 7)]


def test_the_cases_are_there() -> None:
    assert sorted({case for case, _ in RUNS}) == PAIR_CASES


@pytest.mark.parametrize(("case", "ranks"), RUNS)
def test_memory_logits_loss_every_gradient_and_ten_training_steps(case: str, ranks: int) -> None:
    for differences in run_threads(ranks, compare_pairs, case):
        print(f"{case} on {ranks}: {largest(differences)}")
        assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("case", PAIR_CASES)
def test_invariant_blocks_compute_the_same(case: str) -> None:
    differences = run_threads(3, compare_pairs, case, "float64", 3)[2]
    assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("case", PAIR_CASES)
def test_float32_differs_by_rounding_only(case: str) -> None:
    differences = run_threads(2, compare_pairs, case, "float32")[0]
    print(f"{case}: {largest(differences)}")
    differences.pop("training_losses")
    assert {name: value for name, value in differences.items() if not value < 1e-5} == {}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", PAIR_CASES)
def test_greedy_texts_and_beams_are_the_references(case: str, ranks: int) -> None:
    assert run_threads(ranks, compare_texts, case) == [[]] * ranks


def test_distances_fall_into_the_references_buckets() -> None:
    with np.load(PAIRS / "buckets.npz") as golden:
        for name, expected in golden.items():
            both_ways, count, furthest = name.split("/")
            buckets = Buckets(int(count), int(furthest), both_ways == "True")
            np.testing.assert_array_equal(buckets.of(range(-300, 301)), expected, err_msg=name)
