"""`mpitp generate --shares`: the same text, whatever each rank has of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitp.cli import main
from mpitp.layers import speeds
from tests.command_on_threads import command_on_threads
from tests.train.run_case import make_data, tables, write_run_file


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 heads."""
    folder = tmp_path_factory.mktemp("shares")
    settings = tables(make_data(folder), folder / "run", train_steps=1, train_eval_every=0, checkpoint_every=0)
    assert main(["train", str(write_run_file(folder / "run.toml", settings))]) == 0
    return folder / "run/model"


def generated(directory: Path, ranks: int, capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    capsys.readouterr()
    line = [
        "generate",
        "--model",
        str(directory),
        "--prompt",
        "To be",
        "--max-new-tokens",
        "9",
        "--json",
        "--ignore-eos",
    ]
    assert command_on_threads(ranks, *line, "--temperature", "2", "--dtype", "float64", *words) == [0] * ranks
    tokens: list[int] = json.loads(capsys.readouterr().out)["tokens"]
    return tokens


@pytest.mark.parametrize(("ranks", "shares"), [(2, "3,1"), (3, "1,0,2.5")])
def test_the_text_of_one_rank(directory: Path, ranks: int, shares: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generated(directory, ranks, capsys, "--shares", shares) == generated(directory, 1, capsys)


def test_measured(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "measure_speeds", lambda group, device, dtype, width: [0.25, 1.0])
    assert generated(directory, 2, capsys, "--shares", "measured") == generated(directory, 1, capsys)
    words = ["generate", "--model", str(directory), "--prompt", "a", "--shares", "measured", "--max-new-tokens", "1"]
    assert command_on_threads(2, *words) == [0, 0]
    assert "--shares measured: speeds of the ranks 0.25, 1.00; dealt by { tp = [0.25, 1.0] }" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ("1,2,3", "--shares 1,2,3 names 3 weights, and the job has 2 ranks"),
        ("2,-1", "'2,-1': expected measured, or weights of at least 0, one above 0: 2,1"),
        ("0,0", "'0,0': expected measured, or weights"),
        ("1,nan", "'1,nan': expected measured, or weights"),
        ("fast", "'fast': expected measured, or weights"),
    ],
)
def test_bad_shares(directory: Path, shares: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--model", str(directory), "--prompt", "a", f"--shares={shares}"]
    assert command_on_threads(2, *line) == [2, 2]
    assert words in capsys.readouterr().err
