"""Real jobs whose ranks are started differently end within seconds, with code 3 and one message that says in what."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitp.cli import main
from tests.launch.test_launch_faults import MPIEXEC, needs_mpiexec
from tests.train.run_case import make_data, tables, write_run_file

pytestmark = needs_mpiexec
MOST_SECONDS = 20.0  # about 2 on a quiet machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run files of two runs that differ in their seed alone, and their models."""
    folder = tmp_path_factory.mktemp("agreement")
    data = make_data(folder)
    shutil.copytree(data, folder / "elsewhere")
    for name, seed in (("one", 1), ("two", 2)):
        settings = tables(data, folder / name, train_steps=1, train_seed=seed, train_eval_every=0, checkpoint_every=0)
        path = write_run_file(folder / f"{name}.toml", settings)
        assert main(["train", str(path)]) == 0
    fine_tune = tables(data, folder / "tuned", train_steps=1, train_eval_every=0)
    fine_tune["model"] = {"from": str(folder / "one/model")}
    write_run_file(folder / "tuned.toml", fine_tune)
    return folder


def job(folder: Path, first: list[str], second: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Rank 0 runs the first words, rank 1 the second, with these variables."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    program = [sys.executable, "-m", "mpitp"]
    command = [str(MPIEXEC), "-n", "1", *program, *first, ":", "-n", "1", "env", *variables, *program, *second]
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert time.monotonic() - started < MOST_SECONDS
    return done


TRAIN = ["train", "tuned.toml"]
GENERATE = ["generate", "--model", "one/model", "--prompt", "To be"]
DIFFERENT: dict[str, tuple[list[str], list[str], str]] = {
    "learning rate": (TRAIN, [*TRAIN, "--set", "optim.lr=1e-1"], "optim.lr is 0.01 on rank 0, 0.1 on rank 1"),
    "seed": (TRAIN, [*TRAIN, "--set", "train.seed=7"], "train.seed is 1 on rank 0, 7 on rank 1"),
    "steps": (TRAIN, [*TRAIN, "--set", "train.steps=900"], "train.steps is 1 on rank 0, 900 on rank 1"),
    "sequence": (TRAIN, [*TRAIN, "--set", "data.seq_len=4"], "data.seq_len is 8 on rank 0, 4 on rank 1"),
    "resume": (TRAIN, [*TRAIN, "--resume", "auto"], "--resume is not given on rank 0, auto on rank 1"),
    "weights": (TRAIN, [*TRAIN, "--set", "model.from=two/model"], "model.safetensors of model.from is "),
    "text": (TRAIN, [*TRAIN, "--set", "data.train=data/valid"], "manifest.json of data.train is "),
    "prompt": (GENERATE, [*GENERATE[:-1], "Not"], '--prompt is ["To be"] on rank 0, ["Not"] on rank 1'),
    "model": (GENERATE, ["generate", "--model", "two/model", *GENERATE[3:]], "model.safetensors of --model is "),
    "verb": (GENERATE, ["verify", "--model", "one/model"], "the verb is generate on rank 0, verify on rank 1"),
    "verify": (
        ["verify", "--config", "one.toml"],
        ["verify", "--config", "two.toml"],
        "train.run_dir is ",
    ),
    "bench": (["bench", "allreduce"], ["bench", "allreduce", "--max-bytes", "2048"], "--max-bytes is 67108864 on"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_differ(folder: Path, case: str) -> None:
    first, second, words = DIFFERENT[case]
    done = job(folder, first, second)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.count("ConfigError: the ranks were not started alike: ") == 1 and words in done.stderr
    assert "Traceback" not in done.stderr and not (folder / "tuned/metrics.jsonl").exists()


def test_environment_that_differs(folder: Path) -> None:
    pytest.importorskip("numba")
    done = subprocess.run(
        [str(MPIEXEC), "-n", "1", "env", "MPITP_ACCELERATOR=auto", sys.executable, "-m", "mpitp", *GENERATE, ":",
         "-n", "1", "env", "MPITP_ACCELERATOR=off", sys.executable, "-m", "mpitp", *GENERATE],
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.count("the accelerator (MPITP_ACCELERATOR=off leaves it out) is Numba") == 1


def test_same_files_in_other_places_are_the_same(folder: Path) -> None:
    """As on disks of the nodes' own, which may be called otherwise."""
    done = job(folder, GENERATE, GENERATE)
    other = folder / "copied"
    shutil.copytree(folder / "one/model", other, dirs_exist_ok=True)
    second = job(folder, GENERATE, ["generate", "--model", "copied", *GENERATE[3:]])
    assert (done.returncode, second.returncode) == (0, 0) and done.stdout == second.stdout != ""
    words = ["--set", "train.run_dir=shared", "--set", "data.train=elsewhere/train"]
    done = job(folder, [*TRAIN, *words[:2]], [*TRAIN, *words])
    assert done.returncode == 0 and (folder / "shared/model").is_dir()
