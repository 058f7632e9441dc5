"""Mixtures whose experts are rounded to 8 or 4 bits: the same as floats of the same values, on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.load import load_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.convert.rounding import round_weights
from mpitp.infer.generate import generate
from mpitp.layers.expert_matrices import GroupwiseMatrices
from mpitp.layers.experts import Experts
from mpitp.layers.site import make_site
from mpitp.models import CausalLM
from mpitp.ops.groupwise import BITS, Grouping, widened
from tests.convert.test_rounding import loss, save

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 3, "intermediate_size": 96},
    "qwen2_moe": {
        **{**SIZES, "num_hidden_layers": 2, "model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 64},
        **{"shared_expert_intermediate_size": 96, "mlp_only_layers": [1], "head_dim": None, "hidden_size": 128},
    },
}


def folder(kind: str, place: Path) -> Path:
    return save(place, **KINDS[kind])


@pytest.fixture(scope="module", params=KINDS)
def floats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(request.param, tmp_path_factory.mktemp("models") / "floats")


@pytest.fixture(scope="module", params=BITS)
def rounded(request: pytest.FixtureRequest, floats: Path) -> tuple[Path, Grouping]:
    grouping = Grouping(request.param)
    round_weights(floats, floats.parent / f"int{grouping.bits}", grouping)
    return floats.parent / f"int{grouping.bits}", grouping


def widened_params(model: CausalLM, grouping: Grouping) -> dict[str, np.ndarray]:
    """Every matrix as the floats that it stands for, under the name that it has in a model of floats."""
    params, found = dict(model.named_params()), {}
    for name, param in params.items():
        scales = params.get(f"{name}_scale")
        if scales is not None:
            of_this = grouping if param.data.dtype == grouping.dtype else grouping.of_tables
            rows = (param.data.reshape(-1, param.data.shape[-1]), scales.data.reshape(-1, scales.data.shape[-1]))
            found[name] = widened(*rows, of_this).reshape(*param.data.shape[:-1], -1)
        elif not name.endswith("_scale"):
            found[name] = param.data
    return found


def test_products_are_those_of_the_floats_that_codes_stand_for(rounded: tuple[Path, Grouping], floats: Path) -> None:
    """The same text, and the same gradient of what goes into a block."""
    directory, grouping = rounded
    model, plain = (load_model(each, make_site(SerialGroup())) for each in (directory, floats))
    values = widened_params(model, grouping)
    for name, param in plain.named_params():
        param.data[...] = values.pop(name)
    assert not values
    x, run = np.random.default_rng(7).standard_normal((9, plain.config.hidden_size), np.float32), _Run()
    made = []
    for each in (model, plain):
        layer = each["blocks.0.mlp"]
        y, ctx = layer.forward(x, run)
        made.append((y, layer.backward(np.cos(y), ctx)))
    for found, expected in zip(*made, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    prompts = [[1, 2, 3], [9, 8]]
    assert [text.tokens for text in generate(model, prompts, 5)] == [
        text.tokens for text in generate(plain, prompts, 5)
    ]


class _Run:
    """A pass that counts nothing."""

    balance = None


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_reads_its_groups(ranks: int, rounded: tuple[Path, Grouping]) -> None:
    directory, _ = rounded
    np.testing.assert_allclose(run_threads(ranks, loss, directory), loss(SerialGroup(), directory), rtol=2e-6)

    def text(group: Group) -> tuple[int, ...]:
        model = load_model(directory, make_site(group))
        model.types()
        experts = next(layer for name, layer in model.types().items() if name.endswith("mlp.experts")).layer
        assert isinstance(experts, Experts) and isinstance(experts.down, GroupwiseMatrices)
        return tuple(generate(model, [[1, 2, 3]], 4)[0].tokens)

    assert set(run_threads(ranks, text)) == set(run_threads(1, text))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each expert's codes and scales in tensors of their own; routers and norms stay floats."""
    floats = folder("mixtral", tmp_path / "floats")
    assert main(["convert", "--weights", "int4", str(floats), str(tmp_path / "q")]) == 0
    header = (tmp_path / "q" / "model.safetensors").read_bytes()
    tensors = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    expert = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    assert (tensors[expert]["dtype"], tensors[expert]["shape"]) == ("U8", [64, 48])
    assert (tensors[f"{expert}_scale"]["dtype"], tensors[f"{expert}_scale"]["shape"]) == ("F16", [64, 3])
    assert tensors["model.layers.0.block_sparse_moe.gate.weight"]["dtype"] == "F32"
    assert main(["generate", "--model", str(tmp_path / "q"), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    assert main(["verify", "--model", str(tmp_path / "q")]) == 0
    narrow = save(tmp_path / "narrow", **{**KINDS["qwen2_moe"], "moe_intermediate_size": 48})
    capsys.readouterr()
    assert main(["convert", "--weights", "int8", str(narrow), str(tmp_path / "out")]) == 3
    assert "multiples of 32, an expert has 48 columns" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
