"""DistilBERT (Sanh et al. 2019): half of BERT's blocks, no token types, no pooler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpitp.layers.activation import activation_of
from mpitp.layers.build import Builder
from mpitp.layers.layer import Layer
from mpitp.models import bert
from mpitp.models.config import Dropouts, HfConfigReader
from mpitp.models.encoder import HEAD, head_dropout, tokens_head
from mpitp.models.encoder_config import (
    CLASSIFICATION,
    ENCODER_VALUES,
    FEATURES,
    MASKED,
    TOKENS,
    EncoderConfig,
    read_head,
    read_labels,
)
from mpitp.models.facts import read_activation
from mpitp.models.names import HfPiece, dense_pieces, norm_pieces

CLASSES = {
    FEATURES: "DistilBertModel",
    MASKED: "DistilBertForMaskedLM",
    CLASSIFICATION: "DistilBertForSequenceClassification",
    TOKENS: "DistilBertForTokenClassification",
}
IGNORABLE_TENSORS = ("*embeddings.position_ids",)
BASE = "distilbert."
NORM_EPS = 1e-12
KEYS = {
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "heads": "n_heads",
    "kv_heads": "n_heads",
    "ffn_hidden": "hidden_dim",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "labels": "id2label",
    "dropouts.embedding": "dropout",
    "dropouts.residual": "dropout",
    "dropouts.attention": "attention_dropout",
    "head_dropout": "seq_classif_dropout",
}


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """The config of a DistilBERT directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw, ENCODER_VALUES)
    head = read_head(read, CLASSES, {})
    if head == MASKED:
        read.expect("tie_word_embeddings", (True,), True)
    read.flag("sinusoidal_pos_embds", False)  # how positions begin; the files hold them
    dropout, of_classes = read.rate("dropout", 0.1), read.rate("seq_classif_dropout", 0.2)
    config = EncoderConfig(
        model_type="distilbert",
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("dim"),
        num_layers=read.integer("n_layers"),
        heads=read.integer("n_heads"),
        ffn_hidden=read.integer("hidden_dim"),
        max_positions=read.integer("max_position_embeddings", 512),
        norm_eps=NORM_EPS,
        activation=read_activation(read, "activation", "gelu"),
        init_std=read.number("initializer_range", 0.02),
        dropouts=Dropouts(dropout, read.rate("attention_dropout", 0.1), 0.0),
        head=head,
        head_dropout=dropout if head == TOKENS else of_classes,
        labels=read_labels(read, head),
        keys=KEYS,
        hf=dict(raw),
    )
    read.finish(config.max_positions)
    return replace(config, unread=read.unread, notices=tuple(read.notices()))


def features_head(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """Nothing."""
    return {}


def classification_head(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """Dense, ReLU, dropout, classifier, of each text's first token."""
    hidden = config.hidden_size

    def layers(build: Builder) -> dict[str, Layer]:
        dense = build.gathered_dense(hidden, hidden, activation_of("relu", gated=False))
        classifier = build.classifier(hidden, len(config.labels))
        return {"dense": dense, **head_dropout(config, "dropout"), "classifier": classifier}

    return {HEAD: build.on_first_rows(hidden, layers)}


HEADS = {FEATURES: features_head, CLASSIFICATION: classification_head, TOKENS: tokens_head}

_BLOCK = {
    ("attention.qkv", "q"): "attention.q_lin",
    ("attention.qkv", "k"): "attention.k_lin",
    ("attention.qkv", "v"): "attention.v_lin",
    ("attention.out", "out"): "attention.out_lin",
    ("norm1", ""): "sa_layer_norm",
    ("mlp.up", "up"): "ffn.lin1",
    ("mlp.down", "down"): "ffn.lin2",
    ("norm2", ""): "output_layer_norm",
}


def hf_pieces(config: EncoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a DistilBERT directory."""
    base = "" if config.head == FEATURES else BASE
    embeddings = {ours: theirs for ours, theirs in bert.EMBEDDINGS.items() if ours != "types.weight"}
    pieces = bert.trunk_pieces(config, base, embeddings, "transformer.layer", _BLOCK)
    if config.head == MASKED:
        pieces |= dense_pieces("transform.dense", "dense", "vocab_transform")
        pieces |= norm_pieces("transform_norm", "vocab_layer_norm")
        pieces["head.bias", "vocab"] = HfPiece("vocab_projector.bias")
    elif config.head == TOKENS:
        pieces |= dense_pieces("head", "labels", "classifier")
    elif config.head == CLASSIFICATION:
        pieces |= dense_pieces("head.dense.dense", "dense", "pre_classifier")
        pieces |= dense_pieces("head.classifier", "labels", "classifier")
    return pieces


def copies(config: EncoderConfig) -> dict[str, str]:
    """Tensors that a tied head may be stored as, and what they are copies of."""
    return {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"} if config.head == MASKED else {}
