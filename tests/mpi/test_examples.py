"""The README's example "From Python" and the course run on the ranks of a job."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint import Documents, save_model
from mpitp.comm import SerialGroup, world_group
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.layers.site import make_site
from mpitp.models import config_from_hf, new_model

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def save_tiny_model(directory: Path) -> None:
    """A random Llama-type model of bytes, 5 heads on 5 KV heads."""
    tokenizer, group = byte_tokenizer(), world_group()
    config = config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 257,
            "hidden_size": 20,
            "intermediate_size": 31,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "max_position_embeddings": 128,
        }
    )
    model = new_model(config, make_site(group), seed=1)
    save_model(model, directory, group, Documents(config.hf, extra_files=tokenizer.files))


def test_from_python(mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(mpi_tmp_path / "model")
    example = runpy.run_path(str(EXAMPLES / "from_python.py"))
    example["main"](str(mpi_tmp_path / "model"))
    out, group = capsys.readouterr().out, world_group()
    assert re.search(rf"rank {group.rank} of {group.size}: embedding.weight \(\d+, 20\), \|grad\| \d", out)
    if group.rank == 0:
        losses = [float(x) for x in re.findall(r"\d+\.\d+", out[out.index("loss before") :].splitlines()[0])]
        assert losses[0] == losses[1] > losses[-1]
        assert "\nThe value of" in out


WHOLE = [path for path in sorted(EXAMPLES.glob("[0-9][0-9]_*.py")) if path.name[:2] not in ("07", "11", "12", "18")]


def load(path: Path, monkeypatch: pytest.MonkeyPatch, **constants: int) -> Callable[..., None]:
    """The main function of an example, with other constants."""
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as for a script: course.py lies beside it
    monkeypatch.setattr(sys, "argv", [path.name])
    main = runpy.run_path(str(path))["main"]
    main.__globals__.update(constants)
    return main


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What rank 0 has printed, on every rank; the others print nothing."""
    out = capsys.readouterr().out
    assert (out == "") == (world_group().rank > 0)
    return world_group().broadcast_object(out)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_course(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An example proves its own claims."""
    load(path, monkeypatch)(world_group())
    out = said(capsys)
    assert 0 <= out.find("PROOF") < out.find("EXERCISE")


def test_training_on_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Example 07, its first steps only."""
    train = load(EXAMPLES / "07_train_on_real_text.py", monkeypatch, STEPS=4).__globals__["train"]
    np.testing.assert_allclose(train(world_group())[1], train(SerialGroup())[1], rtol=1e-5)


def test_time_against_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load(EXAMPLES / "11_inside_a_node.py", monkeypatch, TOKENS=64, HIDDEN=32)(world_group())
    assert "PROOF" in said(capsys)


def test_planned_layout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = load(EXAMPLES / "18_choosing_a_layout.py", monkeypatch, PLANNED=4)
    main.__globals__["MODEL"] = main.__globals__["SMALL"]  # fits on four ranks
    main(world_group())
    assert "PROOF" in said(capsys)


def test_planted_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load(EXAMPLES / "12_what_breaks.py", monkeypatch)(["3"])
    out = said(capsys)
    assert "Which layer" in out
    assert ("blocks.1.attention.qkv      gradient of the input" in out) == (world_group().size > 1)
