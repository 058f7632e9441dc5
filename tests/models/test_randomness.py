"""Initial weights and dropout masks are the same bytes on 1 to 5 ranks, on NumPy and on the stand-in for CuPy."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import array_module, to_host
from mpitp.backend.device import CpuDevice, Device
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.dropout import Dropout
from mpitp.layers.passes import DropoutState, Pass
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import CausalLM, new_model
from mpitp.models.config import Dropouts
from tests.models.model_cases import CONFIGS, Arrays
from tests.sharded import StrictDevice, assert_same_bits, weights

MODELS = {name: CONFIGS[name] for name in ("gpt2", "llama 9/3", "llama biases, tied, 5/1, llama3", "qwen2 6/2, tied")}
DEVICES: dict[str, Device] = {"numpy": CpuDevice(), "strict": StrictDevice()}
PASS = Pass(Rows.of((5, 1, 70), samples=(0, 11, 2)), DropoutState(seed=7, step=3))
RATES = Dropouts(embedding=0.1, attention=0.2, residual=0.3)

every_layout = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
every_device = pytest.mark.parametrize("device", DEVICES)


def make_model(group: Group, name: str, device: str) -> CausalLM:
    config = dataclasses.replace(MODELS[name], dropouts=RATES)
    return new_model(config, make_site(group, device=DEVICES[device]), seed=11)


def initial_weights(group: Group, name: str, device: str) -> Arrays:
    return weights(group, make_model(group, name, device).named_params())


def masks(group: Group, name: str, device: str) -> Arrays:
    """Every mask of one pass: of the embedding's output, of both residual branches and of all heads in every block."""
    model = make_model(group, name, device)
    found: Arrays = {"embedding": residual_mask(model["embedding dropout"], model)}
    for i, block in enumerate(model.blocks):
        found |= {
            f"{i} residual {j}": residual_mask(dropout, model)
            for j, dropout in enumerate((block.dropout1, block.dropout2))
        }
        heads = group.all_gather_objects(attention_masks(block.attention.heads, model))
        found |= {f"{i} head {head}": mask for own in heads for head, mask in own.items()}
    assert len([key for key in found if " head " in key]) == len(model.blocks) * model.config.heads * len(
        PASS.rows.runs
    )
    return found


def residual_mask(dropout: Dropout, model: CausalLM) -> np.ndarray:
    """What it makes of ones."""
    ones = model.device.xp.ones((PASS.rows.num_tokens, model.config.hidden_size), model.dtype)
    return to_host(dropout.forward(ones, PASS)[0])


def attention_masks(attention: Any, model: CausalLM) -> dict[tuple[int, int], np.ndarray]:
    """The masks of this rank's heads, by (global head, sequence), asked for in tiles as attention does."""
    like = model.device.xp.zeros(1, model.dtype)
    found = {}
    for i, rows in enumerate(PASS.rows.runs):
        mask, length = attention.dropout.masks(PASS, rows, attention.heads, like), rows.length
        for local, head in enumerate(attention.heads.query.span):
            blocks = [range(row, min(row + 16, length)) for row in range(0, length, 16)]
            tiles = [mask(local, queries, range(length)) for queries in blocks]
            assert all(array_module(tile) is model.device.xp for tile in tiles)
            found[head, i] = np.concatenate([to_host(tile) for tile in tiles])
    return found


@cache
def on_one_rank(make: Any, name: str) -> Arrays:
    return make(SerialGroup(), name, "numpy")


@every_layout
@every_device
@pytest.mark.parametrize("name", MODELS)
def test_initial_weights(name: str, device: str, ranks: int) -> None:
    for found in run_threads(ranks, initial_weights, name, device):
        assert_same_bits(found, on_one_rank(initial_weights, name))


@every_layout
@every_device
@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_dropout_masks(name: str, device: str, ranks: int) -> None:
    for found in run_threads(ranks, masks, name, device):
        assert_same_bits(found, on_one_rank(masks, name))


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_masks_are_all_different_and_keep_the_right_share(name: str) -> None:
    found = {key: mask for key, mask in on_one_rank(masks, name).items() if mask.size > 1000}
    assert len({mask.tobytes() for mask in found.values()}) == len(found)
    for key, mask in found.items():
        rate = RATES.embedding if key == "embedding" else RATES.attention if "head" in key else RATES.residual
        assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / (1 - rate))}
        assert abs((mask == 0).mean() - rate) < 5 * (rate * (1 - rate) / mask.size) ** 0.5
