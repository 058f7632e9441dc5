from __future__ import annotations

from pathlib import Path

import numpy as np

from mpitp.comm import Group, make_mesh, run_threads
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers.site import make_site
from mpitp.models import new_model
from tests.models.model_cases import CONFIGS
from tests.models.side_by_side import assert_equal, run_in_pairs, two_steps


def test_each_of_two_models_equals_its_own_run(tmp_path: Path) -> None:
    alone = [run_threads(2, two_steps, pair, tmp_path / f"alone{pair}") for pair in range(2)]
    for pair, place, found in run_threads(4, run_in_pairs, tmp_path):
        assert_equal(found, alone[pair][place])
    assert (alone[0][0]["losses"] != alone[1][0]["losses"]).all()
    for pair in range(2):
        for file in ("model.safetensors", "config.json"):
            own = tmp_path / f"alone{pair}" / file
            assert (tmp_path / f"pair{pair}" / file).read_bytes() == own.read_bytes()


def test_one_world_around_two_models_goes_on_with_one_text(tmp_path: Path) -> None:
    """The world that chooses is the one that was handed in, not that of the model: here equal models on both pairs."""

    def program(world: Group) -> np.ndarray:
        model = new_model(CONFIGS["gpt2"], make_site(make_mesh(world, {"dp": 2, "tp": 2})["tp"]), seed=1)
        own = Sampling(0.9, seed=world.rank)  # only the first rank's counts
        return np.array([text.tokens for text in generate(model, [[1, 2]], 6, own, eos_ids=(), world=world)])

    texts = run_threads(4, program)
    for text in texts[1:]:
        np.testing.assert_array_equal(text, texts[0])
