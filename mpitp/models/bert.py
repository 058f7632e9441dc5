"""BERT (Devlin et al. 2019), MiniLM among its files: token types, a pooler, the erf GELU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.activation import activation_of
from mpitp.layers.build import Builder
from mpitp.layers.layer import Layer
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
    FEATURES: "BertModel",
    MASKED: "BertForMaskedLM",
    CLASSIFICATION: "BertForSequenceClassification",
    TOKENS: "BertForTokenClassification",
}
# Pre-training had more heads (next sentences; species and chain of antibodies), which nothing here uses.
OTHER_CLASSES = {"BertForPreTraining": MASKED, "AntiBERTy": MASKED}
IGNORABLE_TENSORS = (
    *("*embeddings.position_ids", "*embeddings.token_type_ids", "*pooler.dense.*", "cls.seq_relationship.*"),
    *("cls.species.*", "cls.chain.*", "cls.graft.*"),
)
BASE = "bert."
KEYS = {
    "num_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_types": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
    "init_std": "initializer_range",
    "labels": "id2label",
    "dropouts.embedding": "hidden_dropout_prob",
    "dropouts.residual": "hidden_dropout_prob",
    "dropouts.attention": "attention_probs_dropout_prob",
    "head_dropout": "classifier_dropout",
}


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """The config of a BERT directory. Raises ConfigError for what is missing, unknown or not supported."""
    return read_bert_like(raw, CLASSES, OTHER_CLASSES, "num_hidden_layers", offset=0)


def read_bert_like(
    raw: Mapping[str, Any], classes: Mapping[str, str], others: Mapping[str, str], layers_key: str, offset: int
) -> EncoderConfig:
    """What BERT and RoBERTa have in common; `offset`: rows of the position table before the first position's."""
    read = HfConfigReader(raw, ENCODER_VALUES)
    head = read_head(read, classes, others)
    if head == MASKED:
        read.expect("tie_word_embeddings", (True,), True)
    hidden_dropout = read.rate("hidden_dropout_prob", 0.1)
    config = EncoderConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        num_layers=read.integer(layers_key),
        heads=read.integer("num_attention_heads"),
        ffn_hidden=read.integer("intermediate_size"),
        max_positions=read.integer("max_position_embeddings", 512) - offset,
        position_offset=offset,
        num_types=read.integer("type_vocab_size", 2),
        norm_eps=read.number("layer_norm_eps", 1e-12),
        activation=read_activation(read, "hidden_act", "gelu"),
        init_std=read.number("initializer_range", 0.02),
        dropouts=Dropouts(hidden_dropout, read.rate("attention_probs_dropout_prob", 0.1), hidden_dropout),
        head=head,
        head_dropout=read.rate("classifier_dropout", hidden_dropout),
        labels=read_labels(read, head),
        keys=KEYS,
        hf=dict(raw),
    )
    if config.num_types < 1:
        raise ConfigError(f"config.json: type_vocab_size must be at least 1, got {config.num_types}")
    read.finish(config.max_positions)
    return replace(config, unread=read.unread, notices=tuple(read.notices()))


def pooler(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """tanh(x W^T + b)."""
    hidden = config.hidden_size
    return {"pooler": build.gathered_dense(hidden, hidden, activation_of("tanh", gated=False))}


def features_head(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """The pooler alone."""
    return {HEAD: build.on_first_rows(config.hidden_size, partial(pooler, config))}


def classification_head(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """Pooler, dropout, classifier, of each text's first token."""

    def layers(build: Builder) -> dict[str, Layer]:
        classifier = build.classifier(config.hidden_size, len(config.labels))
        return {**pooler(config, build), **head_dropout(config, "dropout"), "classifier": classifier}

    return {HEAD: build.on_first_rows(config.hidden_size, layers)}


HEADS = {FEATURES: features_head, CLASSIFICATION: classification_head, TOKENS: tokens_head}

BLOCK = {
    ("attention.qkv", "q"): "attention.self.query",
    ("attention.qkv", "k"): "attention.self.key",
    ("attention.qkv", "v"): "attention.self.value",
    ("attention.out", "out"): "attention.output.dense",
    ("norm1", ""): "attention.output.LayerNorm",
    ("mlp.up", "up"): "intermediate.dense",
    ("mlp.down", "down"): "output.dense",
    ("norm2", ""): "output.LayerNorm",
}
EMBEDDINGS = {
    "embedding.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.weight",
    "types.weight": "embeddings.token_type_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}


def hf_pieces(config: EncoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a BERT directory."""
    base = "" if config.head == FEATURES else BASE
    pieces = trunk_pieces(config, base, EMBEDDINGS, "encoder.layer", BLOCK)
    if config.head == MASKED:
        pieces |= dense_pieces("transform.dense", "dense", "cls.predictions.transform.dense")
        pieces |= norm_pieces("transform_norm", "cls.predictions.transform.LayerNorm")
        pieces["head.bias", "vocab"] = HfPiece("cls.predictions.bias")
    elif config.head == TOKENS:
        pieces |= dense_pieces("head", "labels", "classifier")
    else:
        pieces |= dense_pieces("head.pooler.dense", "dense", f"{base}pooler.dense")
        if config.head == CLASSIFICATION:
            pieces |= dense_pieces("head.classifier", "labels", "classifier")
    return pieces


def copies(config: EncoderConfig) -> dict[str, str]:
    """Tensors that a tied head may be stored as, and what they are copies of."""
    if config.head != MASKED:
        return {}
    return {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


def trunk_pieces(
    config: EncoderConfig,
    base: str,
    embeddings: Mapping[str, str],
    block_name: str,
    block: Mapping[tuple[str, str], str],
) -> dict[tuple[str, str], HfPiece]:
    """Embeddings and blocks, all names behind `base`."""
    pieces = {
        (ours, "vocab" if ours == "embedding.weight" else ""): HfPiece(base + theirs)
        for ours, theirs in embeddings.items()
    }
    for i in range(config.num_layers):
        for (ours, part), theirs in block.items():
            name, hf_name = f"blocks.{i}.{ours}", f"{base}{block_name}.{i}.{theirs}"
            pieces |= norm_pieces(name, hf_name) if not part else dense_pieces(name, part, hf_name)
    return pieces
