"""`[mesh] sequence_parallel` in a run: training, held-out losses and files are those of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitp.errors import ConfigError
from tests.train.run_case import config, files, losses, make_data, run


def numbers(run_dir: Path) -> list[np.ndarray]:
    """What metrics.jsonl says of each step in numbers: losses, norm, learning rate, ..."""
    return [np.array([value for _, value in line if isinstance(value, int | float)]) for line in losses(run_dir)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def test_a_run_is_that_of_one_rank_and_resumes_without(data: Path, tmp_path: Path) -> None:
    settings = {"model_dtype": "float64", "train_steps": 4, "checkpoint_every": 2}
    run(1, config(data, tmp_path / "one", **settings))
    run(3, config(data, tmp_path / "three", mesh_sequence_parallel=True, **settings))
    one, three = (numbers(tmp_path / name) for name in ("one", "three"))
    np.testing.assert_allclose(np.concatenate(three), np.concatenate(one), rtol=1e-9)
    assert files(tmp_path / "three" / "model").keys() == files(tmp_path / "one" / "model").keys()
    longer = settings | {"train_steps": 6}
    run(1, config(data, tmp_path / "one", **longer), resume="auto")
    run(2, config(data, tmp_path / "three", **longer), resume="auto")
    np.testing.assert_allclose(numbers(tmp_path / "three")[-1], numbers(tmp_path / "one")[-1], rtol=1e-9)


def test_invariant_mode_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh.sequence_parallel and train.invariant can't both be true"):
        config(data, tmp_path, mesh_sequence_parallel=True, train_invariant=True)
