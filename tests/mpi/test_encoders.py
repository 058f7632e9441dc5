"""Encoders on real MPI ranks against PyTorch and transformers: logits, losses, gradients, training."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.checkpoint.encoder import load_trunk
from mpitp.comm import SerialGroup, world_group
from mpitp.infer.embed import embed
from mpitp.layers.site import make_site
from tests.parity.encoder_case import ENCODERS, compare_encoder
from tests.parity.test_vision import compare as compare_vision

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("case", ["bert-masked", "roberta-classification"])
def test_matches_reference(case: str) -> None:
    differences = compare_encoder(world_group(), case)
    assert {name: value for name, value in differences.items() if not value < 1e-11} == {}


def test_a_vision_transformer_matches_the_reference() -> None:
    differences = compare_vision(world_group(), "dinov2-other-size")
    assert {name: value for name, value in differences.items() if not value < 1e-11} == {}


def test_texts_are_embedded_alike() -> None:
    group = world_group()
    model = load_trunk(ENCODERS / "bert-masked", make_site(group, dtype="float64"))
    found = embed(model, [[5, 6, 7], [8], [9, 10]], normalize=True)
    one = load_trunk(ENCODERS / "bert-masked", make_site(SerialGroup(), dtype="float64"))
    np.testing.assert_allclose(found, embed(one, [[5, 6, 7], [8], [9, 10]], normalize=True), atol=1e-12)
