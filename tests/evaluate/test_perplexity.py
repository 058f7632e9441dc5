"""Perplexity: every token but the first is scored once, whatever the windows, the batches and the ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import ConfigError, NumericError
from mpitp.evaluate.perplexity import Windows, perplexity
from mpitp.layers.site import make_site
from mpitp.models import Batch, config_from_hf, new_model

RAW = {
    **{"model_type": "llama", "vocab_size": 257, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3},
    **{"num_key_value_heads": 3, "intermediate_size": 16, "max_position_embeddings": 16, "initializer_range": 0.5},
}
IDS = np.random.default_rng(0).integers(0, 257, 40).tolist()


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_every_token_is_scored_once(tokens: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    windows = list(Windows(length, stride).of(tokens))
    scored = [first + length - k for first, length, k in ((w.first, w.length, w.scored) for w in windows)]
    covered = [place for w in windows for place in range(w.first + w.length - w.scored, w.first + w.length)]
    assert covered == list(range(max(tokens - 1, 0))), scored
    assert all(w.length <= length and w.scored >= 1 for w in windows)
    assert all(w.length == w.scored or w.length - w.scored >= min(length - stride, w.first) for w in windows[1:])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_is_the_mean_loss_of_a_text_that_fits(ranks: int) -> None:
    def run(group: Group) -> tuple[float, float]:
        model = new_model(config_from_hf(RAW), make_site(group, dtype="float64"), seed=1)
        ids = IDS[:17]
        batch = Batch.of_rows([ids[:-1]], [ids[1:]])
        return perplexity(model, ids, 17, Windows(16, 16)).loss, model.loss_forward(batch)[0] / 16

    for loss, expected in run_threads(ranks, run):
        assert loss == pytest.approx(expected, rel=1e-12)


def test_windows_with_context_score_as_alone() -> None:
    model = new_model(config_from_hf(RAW), make_site(SerialGroup(), dtype="float64"), seed=1)
    found = perplexity(model, IDS, 40, Windows(16, 5, batch_size=3))
    losses = []
    for w in Windows(16, 5).of(40):
        ids = IDS[w.first : w.first + w.length + 1]
        whole = model.loss_forward(Batch.of_rows([ids[:-1]], [ids[1:]]))[0]
        context = [-1] * w.scored
        unscored = model.loss_forward(Batch.of_rows([ids[:-1]], [ids[1 : len(ids) - w.scored] + context]))[0]
        losses.append(whole - unscored)
    assert found.num_tokens == 39 and found.loss == pytest.approx(sum(losses) / 39, rel=1e-9)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_a_byte == pytest.approx(found.loss * 39 / math.log(2) / 40)


def test_a_text_without_a_prediction() -> None:
    model = new_model(config_from_hf(RAW), make_site(SerialGroup()), seed=1)
    with pytest.raises(ConfigError, match=r"a text of 1 token\(s\) has nothing to predict"):
        perplexity(model, [1], 1, Windows(4, 4))


def test_damaged_weights_are_no_perplexity() -> None:
    def run(group: Group) -> None:
        model = new_model(config_from_hf(RAW), make_site(group), seed=1)
        dict(model.named_params())["final_norm.weight"].data[...] = np.nan
        with pytest.raises(NumericError, match="the loss is not finite"):
            perplexity(model, [1, 2, 3], 3, Windows(4, 4))

    run_threads(2, run)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    model = new_model(config_from_hf(RAW), make_site(SerialGroup()), seed=1)
    save_model(model, tmp_path / "m", SerialGroup(), Documents(RAW, None, byte_tokenizer().files))
    (tmp_path / "t.txt").write_text("The cat sat on the mat. " * 4)
    return tmp_path


def test_the_command(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "perplexity", "--model", str(model_dir / "m"), str(model_dir / "t.txt")]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["bytes"], found["seq_len"], found["stride"]) == (95, 96, 16, 16)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and found["perplexity"] > 200
    assert main([*words, "--seq-len", "8", "--stride", "4"]) == 0
    assert "windows of 8 tokens, 4 apart" in capsys.readouterr().out
    assert main([*words, "--seq-len", "17"]) == 3
    assert main([*words, "--stride", "17"]) == 2
    assert main([*words[:4], str(model_dir / "gone.txt")]) == 4
    assert "gone.txt" in capsys.readouterr().err
