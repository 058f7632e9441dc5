"""Models with an encoder and a decoder on real MPI ranks against PyTorch and transformers."""

from __future__ import annotations

import pytest

from mpitp.comm import world_group
from tests.mpi.test_verify import verify
from tests.parity.encoder_decoder_case import PAIRS, compare_pairs, compare_texts

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("case", ["t5", "marian"])
def test_matches_reference(case: str) -> None:
    differences = compare_pairs(world_group(), case)
    assert {name: value for name, value in differences.items() if not value < 1e-11} == {}


def test_texts_are_the_references() -> None:
    assert compare_texts(world_group(), "bart") == []


def test_every_layer_is_the_one_rank_models() -> None:
    assert verify("--model", str(PAIRS / "t5"), "--dtype", "float64", "--steps", "1", "--finite-differences", "2") == 0
