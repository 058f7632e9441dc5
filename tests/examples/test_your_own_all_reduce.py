"""An all-reduce of one's own: under a model, and through `train`, `verify` and a trace as run files name it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import your_own_all_reduce
from tests.command_on_threads import command_on_threads

SCRIPT = Path(your_own_all_reduce.__file__)
RUN = """
[model]
model_type = "llama"
hidden_size = 12
num_hidden_layers = 1
num_attention_heads = 3
intermediate_size = 16
max_position_embeddings = 8
dtype = "float64"
[data]
train = "{folder}/data"
seq_len = 8
[train]
steps = 2
micro_batch_size = 2
global_batch_size = 4
run_dir = "{folder}/run"
overwrite = true
"""
BROKEN = """
from mpitp.comm import ForwardingGroup

class Broken(ForwardingGroup):
    def all_reduce(self, x, op="sum", out=None):
        return super().all_reduce(x, "max", out)
"""


def test_the_script_says_what_it_proves() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and len({line.partition(":")[2].rpartition(",")[0] for line in lines}) == 1


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("abc " * 100)
    words = ["data", "prepare", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "data")]
    assert command_on_threads(1, *words) == [0]
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    return str(tmp_path / "run.toml")


def losses(run_file: str) -> list[float]:
    log = Path(run_file).parent / "run" / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_a_run_is_trained_and_verified_with_it(
    run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_on_threads(1, "train", run_file) == [0]
    alone = losses(run_file)
    own = ["--set", f"mesh.group={SCRIPT}:Ring"]
    for ranks, mesh in ((3, []), (4, ["--set", "mesh.dp=2", "--set", "optim.zero=1"])):
        assert command_on_threads(ranks, "train", run_file, *own, *mesh) == [0] * ranks
        assert losses(run_file) == pytest.approx(alone, rel=1e-10)
    assert command_on_threads(2, "verify", "--config", run_file, *own) == [0, 0]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # as PYTHONPATH would
    trace = str(Path(run_file).parent / "trace.json")
    capsys.readouterr()
    named = ["--set", "mesh.group=your_own_all_reduce:Ring", "--trace", trace]
    assert command_on_threads(2, "train", run_file, *named) == [0, 0]
    assert "send" in capsys.readouterr().out  # the ring's own messages


def test_a_wrong_one_ends_the_run_before_it_begins(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(run_file).parent / "broken.py"
    path.write_text(BROKEN)
    assert command_on_threads(2, "train", run_file, "--set", f"mesh.group={path}:Broken") == [5, 5]
    assert f"mesh.group = {path}:Broken doesn't do what the library's group does" in capsys.readouterr().err
    assert not (path.parent / "run").exists()
    assert command_on_threads(2, "train", run_file, "--set", "mesh.group=broken") == [3, 3]
    assert command_on_threads(2, "train", run_file, "--set", f"mesh.group={path}:Other") == [3, 3]
