"""Models side by side in one job: four ranks as 2 x tp 2, each pair with weights, data and files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.hf import Documents, load_params, save_model
from mpitp.comm import Group, make_mesh
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers.site import make_site
from mpitp.models import new_model
from mpitp.train.step import TrainStep
from tests.models.model_cases import CONFIGS, make_batch, make_optimizer

Arrays = dict[str, Any]


def two_steps(world: Group, pair: int, folder: Path, name: str = "llama 9/3") -> Arrays:
    """Train two steps, save, load and generate; what this rank holds of it. `world`: the ranks of the pair."""
    model = new_model(CONFIGS[name], make_site(world, dtype="float32"), seed=pair + 1)
    step = TrainStep(model, make_optimizer(model), 0.5, world)
    results = [step([make_batch(model.config, 3 + pair, first=7 * pair + i)], 1e-2) for i in range(2)]
    save_model(model, folder, world, Documents(model.config.hf))
    loaded = new_model(CONFIGS[name], make_site(world, dtype="float32"), seed=99)
    load_params(loaded, folder)
    texts = generate(loaded, [[1 + pair, 2], [3]], 4 + pair, Sampling(0.9, seed=pair), eos_ids=(), world=world)
    arrays: Arrays = {"losses": np.array([(result.loss, result.grad_norm) for result in results])}
    arrays["texts"] = np.array([text.tokens for text in texts])
    return arrays | {name: param.data for name, param in loaded.named_params()}


def run_in_pairs(world: Group, folder: Path) -> tuple[int, int, Arrays]:
    """This rank's pair, its place in it, and what it holds. An odd number of ranks makes models of one rank each."""
    mesh = make_mesh(world, {"dp": world.size // 2, "tp": 2} if world.size % 2 == 0 else {"dp": world.size, "tp": 1})
    pair = mesh.coordinates["dp"]
    return pair, mesh["tp"].rank, two_steps(mesh["tp"], pair, folder / f"pair{pair}")


def assert_equal(found: Arrays, expected: Arrays) -> None:
    """To the bit: a sum of two ranks is the same in either order."""
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
