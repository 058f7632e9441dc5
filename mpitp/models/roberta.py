"""RoBERTa (Liu et al. 2019): BERT with another head, and positions counted from pad_token_id + 1 on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.activation import activation_of
from mpitp.layers.build import Builder
from mpitp.layers.layer import Layer
from mpitp.models import bert
from mpitp.models.encoder import HEAD, head_dropout, tokens_head
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, MASKED, TOKENS, EncoderConfig
from mpitp.models.names import HfPiece, dense_pieces, norm_pieces

CLASSES = {
    FEATURES: "RobertaModel",
    MASKED: "RobertaForMaskedLM",
    CLASSIFICATION: "RobertaForSequenceClassification",
    TOKENS: "RobertaForTokenClassification",
}
IGNORABLE_TENSORS = ("*embeddings.position_ids", "*embeddings.token_type_ids")
BASE = "roberta."
_DEFAULT_PAD = 1


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """The config of a RoBERTa directory; its masked head has the erf GELU, whatever hidden_act is.

    Raises ConfigError for what is missing, unknown or not supported.
    """
    pad = raw.get("pad_token_id", _DEFAULT_PAD)
    if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
        raise ConfigError(f"config.json: pad_token_id must be a whole number of at least 0, got {pad!r:.60}")
    config = bert.read_bert_like(raw, CLASSES, {}, "num_hidden_layers", offset=pad + 1)
    return replace(config, head_activation="gelu")


def classification_head(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """Dropout, dense, tanh, dropout, classifier, of each text's first token."""
    hidden = config.hidden_size

    def layers(build: Builder) -> dict[str, Layer]:
        dense = build.gathered_dense(hidden, hidden, activation_of("tanh", gated=False))
        out = build.classifier(hidden, len(config.labels))
        return {
            **head_dropout(config, "dropout1"),
            "dense": dense,
            **head_dropout(config, "dropout2"),
            "classifier": out,
        }

    return {HEAD: build.on_first_rows(hidden, layers)}


HEADS = {FEATURES: bert.features_head, CLASSIFICATION: classification_head, TOKENS: tokens_head}


def hf_pieces(config: EncoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a RoBERTa directory."""
    base = "" if config.head == FEATURES else BASE
    pieces = bert.trunk_pieces(config, base, bert.EMBEDDINGS, "encoder.layer", bert.BLOCK)
    if config.head == MASKED:
        pieces |= dense_pieces("transform.dense", "dense", "lm_head.dense")
        pieces |= norm_pieces("transform_norm", "lm_head.layer_norm")
        pieces["head.bias", "vocab"] = HfPiece("lm_head.bias")
    elif config.head == TOKENS:
        pieces |= dense_pieces("head", "labels", "classifier")
    elif config.head == CLASSIFICATION:
        pieces |= dense_pieces("head.dense.dense", "dense", "classifier.dense")
        pieces |= dense_pieces("head.classifier", "labels", "classifier.out_proj")
    else:
        pieces |= dense_pieces("head.pooler.dense", "dense", "pooler.dense")
    return pieces


def copies(config: EncoderConfig) -> dict[str, str]:
    """Tensors that a tied head may be stored as, and what they are copies of."""
    if config.head != MASKED:
        return {}
    return {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }
