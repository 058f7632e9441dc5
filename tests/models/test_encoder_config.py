from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.encoder import load_encoder, load_encoder_config, load_trunk, load_under_head
from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.load import load_config
from mpitp.comm import SerialGroup
from mpitp.errors import ConfigError
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.models.encoders import ENCODER_TYPES, encoder_config_from_hf, new_encoder
from tests.parity.encoder_case import ENCODERS, batch_of, encoder_arrays

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 53,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 24,
    "id2label": {"0": "no", "1": "yes"},
}
DISTIL = {"model_type": "distilbert", "vocab_size": 53, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20}
ROBERTA = {**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}


def site(dtype: str = "float64") -> Any:
    return make_site(SerialGroup(), dtype=dtype)


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supported"),
        (BERT, {"is_decoder": True}, "is_decoder=True is not supported; supported: False"),
        (BERT, {"hidden_act": "mish"}, "hidden_act='mish' is not supported; supported: 'gelu'"),
        (BERT, {"architectures": ["BertForQuestionAnswering"]}, "'BertForQuestionAnswering' is not supported for"),
        (BERT, {"architectures": "BertModel"}, "architectures must be a list of words"),
        (BERT, {"num_labels": 1}, "a classifier of 1 classes is not supported"),
        (BERT, {"problem_type": "regression"}, "problem_type='regression' is not supported"),
        (BERT, {"id2label": {"1": "a", "2": "b"}}, 'id2label must name the classes "0", "1"'),
        (BERT, {"num_attention_heads": 5}, "hidden_size=12 must be a multiple of num_attention_heads=5"),
        (BERT, {"hidden_size": None}, "hidden_size must be a whole number"),
        (BERT, {"type_vocab_size": 0}, "type_vocab_size must be at least 1"),
        (BERT, {"max_position_embeddings": 0}, r"max_position_embeddings must lie in 1 \.\."),
        (ROBERTA, {"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        (ROBERTA, {"pad_token_id": "a"}, "pad_token_id must be a whole number"),
        (ROBERTA, {"pad_token_id": 30}, r"max_position_embeddings must lie in 1 \.\."),
        (DISTIL, {"n_heads": 5}, "dim=12 must be a multiple of n_heads=5"),
        (DISTIL, {"architectures": ["BertModel"]}, "'BertModel' is not supported for model_type 'distilbert'"),
        (BERT, {"model_type": "gpt2"}, "'gpt2' is no encoder; expected one of bert, roberta, distilbert"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        encoder_config_from_hf({**raw, **changes})


def test_a_slip_of_ones_own_is_refused_and_one_of_a_file_told() -> None:
    raw = {**BERT, "hidden_dropout_probe": 0.1}
    assert "hidden_dropout_probe" in encoder_config_from_hf(raw).notices[0]
    with pytest.raises(ConfigError, match="unknown key 'hidden_dropout_probe' .* did you mean 'hidden_dropout_prob'"):
        encoder_config_from_hf(raw, own=raw)


def test_roberta_counts_positions_behind_its_padding() -> None:
    config = encoder_config_from_hf(ROBERTA)
    assert (config.max_positions, config.position_offset) == (22, 2)
    assert encoder_config_from_hf({**ROBERTA, "pad_token_id": 0}).max_positions == 23


def test_num_labels_overrules_names_of_another_number() -> None:
    assert encoder_config_from_hf({**BERT, "num_labels": 3}).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert encoder_config_from_hf(BERT).labels == ("no", "yes")


def test_a_program_that_continues_text_refuses_an_encoder() -> None:
    with pytest.raises(
        ConfigError, match="holds a vision transformer .* mpitp classify, eval images, verify and step take such"
    ):
        load_config(ENCODERS.parent / "golden_vision" / "vit")
    with pytest.raises(
        ConfigError,
        match="holds an encoder .* mpitp embed, eval labels, words or masked, verify and step take encoders",
    ):
        load_config(ENCODERS / "bert-masked")


@pytest.mark.parametrize("case", ["bert-masked", "roberta-classification", "distilbert-masked"])
def test_what_is_saved_is_loaded_again(case: str, tmp_path: Path) -> None:
    config = load_encoder_config(ENCODERS / case)
    model = load_encoder(ENCODERS / case, site())
    save_model(model, tmp_path / "model", SerialGroup(), Documents(config.hf), save_dtype="float64")
    batch = batch_of(encoder_arrays(case))
    expected, _ = model.forward(batch)
    found, _ = load_encoder(tmp_path / "model", site()).forward(batch)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(load_trunk(tmp_path / "model", site()).hidden(batch), model.hidden(batch))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == config.hf["architectures"]


@pytest.mark.parametrize("case", ["bert-masked", "bert-classification", "roberta-masked", "distilbert-masked"])
def test_a_trunk_goes_under_another_head(case: str, tmp_path: Path) -> None:
    """And what was saved with the new head says so, and has its classes."""
    stored = load_encoder_config(ENCODERS / case)
    config = stored.with_head("classification", ["a", "b", "c", "d"])
    model, fresh = load_under_head(ENCODERS / case, site(), config, seed=3)
    batch = batch_of(encoder_arrays(case))
    np.testing.assert_array_equal(model.hidden(batch), load_trunk(ENCODERS / case, site()).hidden(batch))
    has_pooler = case == "bert-classification"
    assert fresh and all(name.startswith("head.") for name in fresh)
    assert ("head.pooler.dense.weight" in fresh) == (not has_pooler and case.startswith("bert"))
    save_model(model, tmp_path / "model", SerialGroup(), Documents(config.hf))
    assert load_encoder_config(tmp_path / "model").labels == ("a", "b", "c", "d")
    again, fresh = load_under_head(tmp_path / "model", site(), config, seed=4)
    assert fresh == []
    np.testing.assert_allclose(again.forward(batch)[0], model.forward(batch)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ENCODER_TYPES)
@pytest.mark.parametrize("head", ["features", "masked", "classification", "tokens"])
def test_every_head_of_every_type_has_names_for_all_its_parameters(model_type: str, head: str) -> None:
    raw = {**DISTIL, **BERT, "model_type": model_type, "architectures": None}
    config = encoder_config_from_hf(raw).with_head(head, ("a", "b") if head in ("classification", "tokens") else ())
    model = new_encoder(config, site(), seed=1)
    parts = {(name, part.name) for name, param in model.named_params() for part, _ in param.placement.places()}
    assert parts == set(model.hf_pieces())
    assert len({(piece.tensor, piece.start) for piece in model.hf_pieces().values()}) == len(parts)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Batch.of_lists([[1, 53]]), "token id 53 lies outside the model's vocabulary 53"),
        (Batch.of_lists([[1], []]), "a text without tokens"),
        (Batch.of_lists([[1] * 25]), "a text of 25 tokens exceeds the model's 24 positions"),
    ],
)
def test_batches_that_are_refused(batch: Batch, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        new_encoder(encoder_config_from_hf(BERT), site(), seed=1).forward(batch)


def test_targets_that_are_refused() -> None:
    model = new_encoder(encoder_config_from_hf(BERT), site(), seed=1)
    rows = Batch.of_lists([[1, 2], [3]])
    with pytest.raises(ConfigError, match="class 2 lies outside the model's 2"):
        model.loss_forward(Batch(rows.tokens, rows.rows, np.array([0, 2])))
    with pytest.raises(ConfigError, match="3 targets for 2 rows"):
        model.loss_forward(Batch(rows.tokens, rows.rows, np.array([0, 1, 1])))
    features = new_encoder(encoder_config_from_hf(BERT).with_head("features"), site(), seed=1)
    with pytest.raises(ConfigError, match="gives features alone"):
        features.loss_forward(Batch(rows.tokens, rows.rows, np.array([0, 1])))
