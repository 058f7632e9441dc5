"""BERT, RoBERTa and DistilBERT against PyTorch and transformers, tensor by tensor, on 1 to 7 ranks that are threads."""

from __future__ import annotations

import pytest

from mpitp.comm import run_threads
from tests.parity.encoder_case import ENCODER_CASES, compare_cut, compare_encoder
from tests.parity.golden_case import largest

TOLERANCE = 1e-11  # float64; what is seen is about 1e-15, in training losses 1e-12
HEADS = ["classification", "masked"]


def test_the_cases_are_there() -> None:
    pairs = [f"{kind}-{head}" for kind in ("bert", "distilbert", "roberta") for head in HEADS]
    assert sorted([*pairs, "bert-tokens"]) == ENCODER_CASES


RUNS = [(case, ranks) for case in ("bert-masked", "bert-classification") for ranks in (1, 2, 3, 4, 5, 7)]
RUNS += [(case, ranks) for case in ENCODER_CASES if (case, 1) not in RUNS for ranks in (1, 3, 7)]


@pytest.mark.parametrize(("case", "ranks"), RUNS)
def test_logits_loss_every_gradient_and_ten_training_steps(case: str, ranks: int) -> None:
    for differences in run_threads(ranks, compare_encoder, case):
        print(f"{case} on {ranks}: {largest(differences)}")
        assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_invariant_blocks_compute_the_same(case: str) -> None:
    differences = run_threads(3, compare_encoder, case, "float64", 4)[2]
    assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize(("case", "ranks"), [("bert-masked", 2), ("bert-classification", 5), ("roberta-masked", 3)])
def test_with_sequence_parallelism(case: str, ranks: int) -> None:
    for differences in run_threads(ranks, lambda group: compare_encoder(group, case, sequence_parallel=True)):
        assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize(("case", "form"), [("bert-masked", "ring"), ("bert-classification", "heads")])
def test_with_texts_cut_over_the_ranks(case: str, form: str) -> None:
    differences = run_threads(3, compare_cut, case, form)[0]
    assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_float32_differs_by_rounding_only(case: str) -> None:
    differences = run_threads(2, compare_encoder, case, "float32")[0]
    print(f"{case}: {largest(differences)}")
    differences.pop("training_losses")
    assert {name: value for name, value in differences.items() if not value < 1e-5} == {}
