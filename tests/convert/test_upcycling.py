"""`mpitp convert --upcycle`: a mixture of experts that computes what the dense model does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint import load_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.site import make_site
from mpitp.models import Batch
from tests.parity.golden_case import GOLDEN, golden_arrays

DENSE = ["llama-gqa", "mistral", "llama-dynamic"]


def logits_of(group: Group, directory: Path, tokens: np.ndarray) -> np.ndarray:
    model = load_model(directory, make_site(group, dtype="float64"))
    return model.gather_logits(model.forward(Batch.of_rows(tokens))[0])


@pytest.mark.parametrize("case", DENSE)
def test_the_mixture_is_the_dense_model(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--upcycle", "3", str(GOLDEN / case), str(tmp_path / "out")]) == 0
    assert "3 experts, 2 a token" in capsys.readouterr().out
    golden = golden_arrays(case)
    for found in run_threads(2, logits_of, tmp_path / "out", golden["tokens"]):
        np.testing.assert_allclose(found, golden["logits"], rtol=1e-10, atol=1e-11)
    router = load_model(tmp_path / "out", make_site(SerialGroup()))["blocks.0.mlp.router"].product.weight.data
    assert np.ptp(router) > 0, "a router of equal weights sends every token the same way"


def test_what_a_file_leaves_out_is_the_dense_type_s_default(tmp_path: Path) -> None:
    """A Mixtral's theta and epsilon are others than a Llama's."""
    shutil.copytree(GOLDEN / "llama-gqa", tmp_path / "dense")
    raw = json.loads((tmp_path / "dense" / "config.json").read_text())
    for key in ("rope_parameters", "rms_norm_eps", "max_position_embeddings"):
        raw.pop(key)
    (tmp_path / "dense" / "config.json").write_text(json.dumps(raw))
    assert main(["convert", "--upcycle", "2", str(tmp_path / "dense"), str(tmp_path / "out")]) == 0
    tokens = golden_arrays("llama-gqa")["tokens"]
    dense, mixture = (logits_of(SerialGroup(), tmp_path / name, tokens) for name in ("dense", "out"))
    np.testing.assert_allclose(mixture, dense, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--upcycle", "2", "--experts-per-token", "3", "llama-gqa"], 2, "no more than there are"),
        (["--upcycle", "0", "llama-gqa"], 2, "a token goes to one expert at least"),
        (["--experts-per-token", "3", "llama-gqa"], 2, "--experts-per-token is for --upcycle"),
        (["--upcycle", "2", "--weights", "int8", "llama-gqa"], 2, "leave out --weights"),
        (["--upcycle", "2", "llama-gqa/config.json"], 2, "isn't one; convert it first"),
        (["--upcycle", "2", "gpt2"], 3, "only a llama or a mistral in floats"),
        (["--upcycle", "2", "llama-mqa-bias"], 3, "has no biases"),
    ],
)
def test_what_is_refused(
    words: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *options, source = words
    assert main(["convert", *options, str(GOLDEN / source), str(tmp_path / "out")]) == code
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "out").exists()
