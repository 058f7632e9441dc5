"""Activations that are rounded beside rounded weights: when they are, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.load import load_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.convert.rounding import round_weights
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.models.activations import round_activations
from mpitp.models.model import CausalLM
from mpitp.ops.groupwise import Grouping, groupwise_forward
from mpitp.ops.rounded import rounded_forward
from tests.convert.test_rounding import save

TOKENS = np.random.default_rng(3).integers(0, 257, (2, 9))
MIXTURE: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {"floats": save(folder / "floats"), "int4": folder / "int4", "experts": folder / "experts"}
    round_weights(found["floats"], found["int4"], Grouping(4))
    round_weights(save(folder / "mixtral", **MIXTURE), found["experts"], Grouping(8))
    return found


def ways(model: CausalLM) -> set[Any]:
    """What the model's linears multiply by."""
    layers = (model["blocks.0.attention.qkv"], model["blocks.1.mlp.down"], model["head"])
    return {layer.product.multiply for layer in layers}


def test_auto_rounds_where_it_is_faster(directories: dict[str, Path]) -> None:
    for blocks, expected in ((0, rounded_forward), (2, groupwise_forward)):
        model = load_model(directories["int4"], make_site(SerialGroup(), invariant_blocks=blocks))
        round_activations(model)
        assert ways(model) == {expected}
    wide = load_model(directories["int4"], make_site(SerialGroup(), dtype="float64"))
    round_activations(wide)
    assert ways(wide) == {groupwise_forward}
    model = load_model(directories["int4"], make_site(SerialGroup()))
    round_activations(model, "float")
    assert ways(model) == {groupwise_forward}
    round_activations(load_model(directories["floats"], make_site(SerialGroup())))  # floats stay floats


@pytest.mark.parametrize("name", ["int4", "experts"])
def test_losses_with_rounded_activations(name: str, directories: dict[str, Path]) -> None:
    """Near those without, and alike on all ranks."""

    def loss(group: Group, choice: str) -> float:
        model = load_model(directories[name], make_site(group))
        round_activations(model, choice)
        return model.loss_forward(Batch.of_rows(TOKENS[:, :-1], TOKENS[:, 1:]))[0]

    exact, alone = loss(SerialGroup(), "float"), loss(SerialGroup(), "auto")
    assert exact != alone and abs(alone - exact) < 0.01 * exact
    for ranks in (2, 3):
        np.testing.assert_allclose(run_threads(ranks, loss, "auto"), alone, rtol=2e-3)  # a last bit may round otherwise


def test_the_commands(directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("open open close open " * 5)
    found = []
    for choice in ("auto", "int8", "float"):
        words = ["eval", "perplexity", "--model", str(directories["int4"]), str(text), "--activations", choice]
        assert main(words) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]
    words = ["generate", "--model", str(directories["floats"]), "--prompt", "ab", "--activations", "int8"]
    assert main(words) == 3
    assert "this model's are floats" in capsys.readouterr().err
    words = ["generate", "--model", str(directories["int4"]), "--prompt", "ab", "--max-new-tokens", "3"]
    assert main(words) == 0
