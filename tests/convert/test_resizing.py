"""Tokens that were added to a tokenizer: passed over where no text has them, refused where one does; rows for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from mpitp.checkpoint.encoder import load_encoder
from mpitp.checkpoint.encoder_decoder import load_encoder_decoder
from mpitp.checkpoint.hf_directory import read_config
from mpitp.checkpoint.load import load_model
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models.batch import Batch
from mpitp.models.encoder_decoders import is_encoder_decoder
from mpitp.models.encoders import is_encoder
from tests.command_on_threads import command_on_threads
from tests.models.encoder_files import make_encoder

ADDED = ("<call>", "<answer>", "<done>")
PARITY = Path(__file__).parent.parent / "parity"
CASES = [f"golden/{name}" for name in ("llama-gqa", "gpt2", "gemma3", "olmo2", "qwen2-moe")]
CASES += ["golden_encoders/bert-masked", "golden_encoder_decoders/bart", "golden_encoder_decoders/t5-gated"]
IDS = np.array([[3, 4, 5, 6], [7, 8, 9, 10]])


def add_tokenizer(directory: Path, words: int) -> None:
    """One with so many words, and three tokens added to it."""
    vocabulary = {f"w{i}": i for i in range(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(ADDED))
    (directory / "tokenizer.json").write_text(backend.to_str())


def copied(case: str, directory: Path) -> tuple[Path, int]:
    """A golden directory with a tokenizer that has more tokens than the model rows; these."""
    shutil.copytree(PARITY / case, directory)
    rows = read_config(directory)["vocab_size"]
    add_tokenizer(directory, rows)
    return directory, rows


def logits_of(group: Group, directory: Path) -> np.ndarray:
    raw, site = read_config(directory), make_site(group, dtype="float64")
    load = load_encoder if is_encoder(raw) else load_encoder_decoder if is_encoder_decoder(raw) else load_model
    model = load(directory, site)
    source = Batch.of_rows(IDS) if is_encoder_decoder(raw) else None
    logits, _ = model.forward(Batch(IDS.reshape(-1), Rows.of([4, 4]), source=source))
    return model.gather_logits(logits)


@pytest.mark.parametrize("case", CASES)
def test_old_logits_stay_and_new_ones_are_their_mean(case: str, tmp_path: Path) -> None:
    source, rows = copied(case, tmp_path / "model")
    assert main(["convert", "--resize-vocabulary", str(source), str(tmp_path / "grown")]) == 0
    assert read_config(tmp_path / "grown")["vocab_size"] == rows + 3
    expected = logits_of(SerialGroup(), source)
    for ranks in (1, 2, 5):
        for found in run_threads(ranks, logits_of, tmp_path / "grown"):
            np.testing.assert_allclose(found[:, :rows], expected, rtol=0, atol=1e-12)
            mean = np.broadcast_to(expected.mean(axis=1, keepdims=True), (len(found), 3))
            np.testing.assert_allclose(found[:, rows:], mean, rtol=0, atol=5e-7)  # means are stored in float32


def test_a_token_without_a_row_is_refused_where_it_occurs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, rows = copied("golden/llama-gqa", tmp_path / "model")
    words = ["generate", "--model", str(directory), "--max-new-tokens", "2", "--prompt"]
    assert command_on_threads(2, *words, "w3 w4") == [0, 0]
    capsys.readouterr()
    assert command_on_threads(1, *words, "w3 <answer>") == [3]
    said = capsys.readouterr().err
    assert f"text 1 has the token '<answer>' (id {rows + 1})" in said
    assert f"give it one: mpitp convert --resize-vocabulary {directory} NEW_DIR" in said
    assert main(["convert", "--resize-vocabulary", str(directory), str(tmp_path / "grown")]) == 0
    assert "53 rows of the vocabulary became 56" in capsys.readouterr().out
    words[2] = str(tmp_path / "grown")
    assert command_on_threads(2, *words, "w3 <answer>") == [0, 0]
    assert main(["convert", "--resize-vocabulary", str(tmp_path / "grown"), str(tmp_path / "more")]) == 3
    assert "has 56 rows, and its tokenizer 56 tokens: each has one already" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(PARITY / "golden" / "llama-gqa", tmp_path / "model")
    add_tokenizer(tmp_path / "model", 60)
    assert main(["convert", "--resize-vocabulary", str(tmp_path / "model"), str(tmp_path / "grown")]) == 3
    assert "has ids up to 59, but the model's vocab_size is 53: it is another model's" in capsys.readouterr().err
    assert not (tmp_path / "grown").exists()


def test_vectors_of_texts_without_the_added_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_encoder(tmp_path / "bert", vocab_size=257)
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().files["tokenizer.json"].decode())
    backend.add_special_tokens(list(ADDED))
    (directory / "tokenizer.json").write_text(backend.to_str())
    words = ["embed", "--model", str(directory), "--json"]
    assert command_on_threads(2, *words, "some text") == [0, 0]
    assert command_on_threads(1, *words, "some", "<call>") == [3]
    assert "text 2 has the token '<call>' (id 257)" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "code"), [("w3 w4 w5 w6 w7", 0), ("w3 w4 <call> w6 w7", 3)])
def test_prepared_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int) -> None:
    directory, _ = copied("golden/llama-gqa", tmp_path / "model")
    (tmp_path / "text").write_text(f"{text} " * 20)
    prepare = ["data", "prepare", str(tmp_path / "text"), "--out", str(tmp_path / "data"), "--tokenizer"]
    assert main([*prepare, str(directory)]) == 0
    run = {
        **{"model": {"from": str(directory)}, "data": {"train": str(tmp_path / "data"), "seq_len": 8}},
        **{"train": {"steps": 1, "run_dir": str(tmp_path / "run")}, "optim": {"lr": 1e-3}},
    }
    (tmp_path / "run.toml").write_text(
        "\n".join(f"{section} = {{{inner}}}" for section, inner in ((k, _inline(v)) for k, v in run.items()))
    )
    assert set(command_on_threads(2, "train", str(tmp_path / "run.toml"))) == {code}
    if code:
        assert "tokens.bin has the token '<call>' (id 53)" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def _inline(table: dict[str, object]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
