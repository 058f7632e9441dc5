"""Training with the accelerator: the plain curve to rounding, the same bits on any number of ranks; without Numba."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.backend.accelerator import use_accelerator
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.site import make_site
from mpitp.models import new_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep
from tests.parity.golden_case import CASES, GOLDEN, compare, compare_training, golden_arrays
from tests.parity.test_golden import TOLERANCE, TRAINING_TOLERANCE
from tests.sharded import assert_same_bits
from tests.train import run_case
from tests.train.invariant_case import CONFIGS, batch, train_and_generate

STEPS = 12
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def losses(group: Group, name: str) -> list[float]:
    model = new_model(CONFIGS[name], make_site(group), seed=3)
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()), clip_norm=1.0)
    return [step([batch(model.config, i)], 1e-2).loss for i in range(1, STEPS + 1)]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_curve_is_the_plain_one_to_rounding(accelerated: None, name: str) -> None:
    use_accelerator(False)
    plain = losses(SerialGroup(), name)
    use_accelerator(True)
    for ranks in (1, 2, 3):
        for found in run_threads(ranks, losses, name):
            assert found != plain, "the accelerator was not in use"
            np.testing.assert_allclose(found, plain, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_invariant_bits_on_one_to_three_ranks(accelerated: None, name: str) -> None:
    expected = train_and_generate(SerialGroup(), name, STEPS)
    for ranks in (2, 3):
        for found in run_threads(ranks, train_and_generate, name, STEPS):
            assert_same_bits(found, expected)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_parity_in_float64(accelerated: None, case: str, ranks: int) -> None:
    golden = golden_arrays(case)
    for differences in run_threads(ranks, compare, GOLDEN / case, golden):
        assert {name: value for name, value in differences.items() if not value < TOLERANCE} == {}
    for differences in run_threads(ranks, compare_training, GOLDEN / case, golden):
        assert {name: value for name, value in differences.items() if not value < TRAINING_TOLERANCE} == {}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accelerator")
    data = run_case.make_data(folder)
    tables = run_case.tables(data, folder / "run", train_steps=3, train_eval_every=None, train_overwrite=True)
    del tables["checkpoint"]
    return run_case.write_run_file(folder / "run.toml", tables)


def train(run_file: Path, *command: str, **environment: str) -> list[float]:
    """Run the command line with the accelerator; its losses. It must say nothing on stderr but a progress bar."""
    result = subprocess.run(
        [*command, "train", str(run_file)],
        env={**os.environ, "MPITP_ACCELERATOR": "auto", **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    assert "umba" not in result.stderr and "warning" not in result.stderr.lower()
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (run_file.parent / "run/metrics.jsonl").read_text().splitlines()
    ]
    return [line["loss"] for line in lines]


def test_without_numba(run_file: Path) -> None:
    code = "import sys; sys.modules['numba'] = None; from mpitp.cli import main; sys.exit(main(sys.argv[1:]))"
    plain = train(run_file, sys.executable, "-m", "mpitp", MPITP_ACCELERATOR="off")
    assert train(run_file, sys.executable, "-c", code) == plain


@pytest.mark.slow
@pytest.mark.skipif(not MPIEXEC.exists(), reason="this environment has no mpiexec")
def test_four_ranks_compile_at_once(accelerated: None, run_file: Path, tmp_path: Path) -> None:
    command = (str(MPIEXEC), "-n", "4", sys.executable, "-m", "mpitp")
    cold = train(run_file, *command, NUMBA_CACHE_DIR=str(tmp_path))
    kept = list(tmp_path.rglob("*.nbi"))
    assert any("softmax_numerators" in file.name for file in kept)
    assert train(run_file, *command, NUMBA_CACHE_DIR=str(tmp_path)) == cold
    assert sorted(tmp_path.rglob("*.nbi")) == sorted(kept)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_with_another_is_told_and_recorded(
    accelerated: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    """In invariant mode too its bits are others, so that it must not change unsaid."""
    data = run_case.make_data(tmp_path)
    changes: dict[str, Any] = {"train_invariant": True, "checkpoint_every": 2, "train_eval_every": 0}
    run_case.run(ranks, run_case.config(data, tmp_path / "run", train_steps=2, **changes))
    use_accelerator(False)
    whole = run_case.config(data, tmp_path / "plain", train_steps=4, **changes)
    run_case.run(ranks, whole)
    capsys.readouterr()
    run_case.run(ranks, run_case.config(data, tmp_path / "run", train_steps=4, **changes), resume="auto")
    used = f"Numba {__import__('numba').__version__}"
    assert f"mpitp: resuming with another accelerator: {used}, now none\n" in capsys.readouterr().err
    mixed, plain = ([dict(line) for line in run_case.losses(tmp_path / name)] for name in ("run", "plain"))
    assert [line["accelerator"] for line in mixed] == [used, used, "none", "none"]
    assert {line["accelerator"] for line in plain} == {"none"}
    assert [line["grad_norm"] for line in mixed] != [line["grad_norm"] for line in plain]
    capsys.readouterr()
    run_case.run(ranks, run_case.config(data, tmp_path / "run", train_steps=5, **changes), resume="auto")
    assert "accelerator" not in capsys.readouterr().err  # the same as the checkpoint's


def test_another_blas_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run_case.make_data(tmp_path)
    changes: dict[str, Any] = {"checkpoint_every": 1, "train_eval_every": 0}
    run_case.run(1, run_case.config(data, tmp_path / "run", train_steps=1, **changes))
    pools = [{"user_api": "blas", "internal_api": "mkl", "version": "1"}, {"user_api": "openmp"}]
    monkeypatch.setattr("threadpoolctl.threadpool_info", lambda: pools)
    capsys.readouterr()
    run_case.run(1, run_case.config(data, tmp_path / "run", train_steps=2, **changes), resume="auto")
    told = [line for line in capsys.readouterr().err.splitlines() if "another BLAS" in line]
    assert len(told) == 1 and told[0].endswith(", now mkl 1")
