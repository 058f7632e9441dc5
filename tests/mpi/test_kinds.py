"""Encoders and encoder-decoders over token shards, sequences and stages on real MPI ranks against the references."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource, load_encoder_decoder_config
from mpitp.comm import make_mesh, world_group
from mpitp.layers.site import make_site
from mpitp.models.runner import PlainRunner
from mpitp.optim.grad_norm import GradNorm
from mpitp.pipeline.runner import PipelineRunner
from tests.parity.encoder_case import compare_cut, compare_encoder
from tests.parity.encoder_decoder_case import PAIRS, batch_of, compare_cut_pairs, pair_arrays
from tests.parity.golden_case import named

pytestmark = pytest.mark.mpi


def test_token_shards_match_the_reference() -> None:
    differences = compare_encoder(world_group(), "bert-classification", sequence_parallel=True)
    assert {name: value for name, value in differences.items() if not value < 1e-11} == {}


def test_texts_cut_over_the_ranks_match_the_reference() -> None:
    differences = compare_cut(world_group(), "bert-masked", "ring")
    assert {name: value for name, value in differences.items() if not value < 1e-11} == {}


@pytest.mark.parametrize("case", ["t5", "marian"])
def test_stages_of_pairs_match_the_reference(case: str) -> None:
    group, golden = world_group(), pair_arrays(case)
    site = make_site(make_mesh(group, {"pp": group.size}), dtype="float64")
    model = EncoderDecoderSource(load_encoder_decoder_config(PAIRS / case), PAIRS / case).make(site)
    batches = [batch_of(golden)] * group.size
    runner = PipelineRunner(model, "1f1b") if group.size > 1 else PlainRunner(model)
    targets = batches[0].num_targets
    losses = runner(batches, 1 / (targets * group.size))
    np.testing.assert_allclose(losses, golden["loss"] * targets, rtol=1e-11)
    norm = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in named(golden, "grad/").values()))
    np.testing.assert_allclose(GradNorm(model.named_params(), group)(), norm, rtol=1e-11)


@pytest.mark.parametrize("case", ["t5", "marian"])
def test_pairs_cut_over_the_ranks_match_the_reference(case: str) -> None:
    differences = compare_cut_pairs(world_group(), case)
    assert {name: value for name, value in differences.items() if not value < 1e-11} == {}
