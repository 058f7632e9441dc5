"""Encoders, vision transformers, and models with an encoder and a decoder, to be stepped through."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.encoder import load_encoder_config
from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource, load_encoder_decoder_config
from mpitp.checkpoint.encoder_source import EncoderSource
from mpitp.checkpoint.hf_directory import read_config
from mpitp.checkpoint.vision import load_vision_config
from mpitp.data.tokenizer import Tokenizer, load_tokenizer
from mpitp.errors import ConfigError, UsageError
from mpitp.files import read_json
from mpitp.layers.partition import share_of
from mpitp.layers.rows import Rows
from mpitp.layers.site import Site
from mpitp.models.batch import IGNORED, Batch
from mpitp.models.config import Dropouts
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, MASKED, EncoderConfig
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig, PairDropouts
from mpitp.models.encoder_decoders import encoder_decoder_config_from_hf, is_encoder_decoder
from mpitp.models.encoders import encoder_config_from_hf, is_encoder
from mpitp.models.layered import LayeredModel
from mpitp.models.vision_config import VisionConfig, is_vision, vision_config_from_hf
from mpitp.step.wish import Subject, Wish

# What the tiny models' ids stand for.
WORDS = ("a", "the", "cat", "dog", "sat", "ran", "on", "to", "mat", "hill", ".")
OTHER_PRESETS: dict[str, dict[str, Any]] = {
    "bert": {
        **{"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 11, "hidden_size": 6},
        **{"num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 7, "max_position_embeddings": 64},
        **{"type_vocab_size": 1, "initializer_range": 0.5},
    },
    "vit": {
        **{"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 6, "image_size": 4},
        **{"num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 7, "patch_size": 2},
        **{"num_channels": 1, "num_labels": 4, "initializer_range": 0.5},
    },
    "t5": {
        **{"model_type": "t5", "vocab_size": 11, "d_model": 4, "d_kv": 2, "num_heads": 3, "d_ff": 7, "num_layers": 1},
        **{"relative_attention_num_buckets": 4, "relative_attention_max_distance": 8, "eos_token_id": 10},
        **{"feed_forward_proj": "gated-gelu"},
    },
    "bart": {
        **{"model_type": "bart", "vocab_size": 11, "d_model": 6, "encoder_layers": 1, "decoder_layers": 1},
        **{"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 7, "decoder_ffn_dim": 7},
        **{"max_position_embeddings": 64, "init_std": 0.5, "eos_token_id": 10, "pad_token_id": 9},
    },
}
_CLASSES_OF_A_NEW_HEAD = 5

OtherConfig = EncoderConfig | VisionConfig | EncoderDecoderConfig


def other_subject(wish: Wish, ranks: int) -> Subject | None:
    """What the wish names, if it is no model that continues text; `ranks`: along tp."""
    config = _config(wish)
    if config is None:
        return None
    _refuse_axes(wish)
    directory = None if wish.model is None else Path(wish.model)
    batches = _batches(wish, config)
    where = f"block {wish.block} of {wish.model}" if wish.model is not None else f"{config.model_type}, fresh weights"

    def make(site: Site) -> LayeredModel:
        source = EncoderDecoderSource if isinstance(config, EncoderDecoderConfig) else EncoderSource
        model = source(config, directory, wish.seed).make(site)  # type: ignore[arg-type]
        return model if directory is None else _with_one_block(model, wish.block)

    return Subject(config, where, make, batches, _facts(config, ranks), _words(wish, config, batches))


def _config(wish: Wish) -> OtherConfig | None:
    """Of the model, with a head and without dropout; None: it continues text."""
    if wish.model is not None:
        config = _stored(wish.model)
        if config is not None:
            _check_block(wish.block, config)
    else:
        config = _fresh(wish)
    if config is None:
        return None
    if isinstance(config, EncoderDecoderConfig):
        return dataclasses.replace(config, dropouts=PairDropouts())
    if config.head == FEATURES:  # so that there is a loss
        config = config.with_head(CLASSIFICATION, [f"LABEL_{i}" for i in range(_CLASSES_OF_A_NEW_HEAD)])
    if isinstance(config, EncoderConfig):
        config = dataclasses.replace(config, head_dropout=0.0)
    return dataclasses.replace(config, dropouts=Dropouts())


def _stored(directory: str) -> OtherConfig | None:
    raw = read_config(directory)
    if is_vision(raw):
        return load_vision_config(directory)
    if is_encoder_decoder(raw):
        return load_encoder_decoder_config(directory)
    return load_encoder_config(directory) if is_encoder(raw) else None


def _fresh(wish: Wish) -> OtherConfig | None:
    """Of a config.json, or a preset."""
    if wish.config is None:
        raw = OTHER_PRESETS.get(wish.preset, {})
    elif Path(wish.config).suffix == ".toml":  # refused where models that continue text are read
        return None
    else:
        path = Path(wish.config)
        raw = read_json(path / "config.json" if path.is_dir() else path)
    fields = with_overrides(raw, wish.overrides)
    own = {key: fields[key] for key in (text.partition("=")[0] for text in wish.overrides)}
    if is_vision(fields):
        return vision_config_from_hf(fields, own)
    if is_encoder_decoder(fields):
        return encoder_decoder_config_from_hf(fields, own)
    return encoder_config_from_hf(fields, own) if is_encoder(fields) else None


def with_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, the value as JSON or else as a word."""
    fields = dict(raw)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected KEY=VALUE, for example --set hidden_size=8")
        try:
            fields[key] = json.loads(value)
        except ValueError:
            fields[key] = value
    return fields


def _check_block(block: int, config: OtherConfig) -> None:
    if isinstance(config, EncoderDecoderConfig):
        whose, count = "encoder and decoder both have", min(config.encoder.num_layers, config.decoder.num_layers)
    else:
        whose, count = "the model has", config.num_layers
    if not 0 <= block < count:
        raise UsageError(f"--block {block}: {whose} the blocks 0 to {count - 1}")


def _refuse_axes(wish: Wish) -> None:
    """Raise UsageError for what is shown of models that continue text alone."""
    for option, is_set in (("--pp", wish.layout.pp > 1), ("--cp", wish.layout.cp > 1)):
        if is_set:
            raise UsageError(
                f"{option} is shown with models that continue text; others take tp, dp, --sequence-parallel"
            )


def _with_one_block(model: LayeredModel, number: int) -> LayeredModel:
    """The model with this one of its blocks (of each side, where it has two)."""
    for name in list(model.layers):
        words = name.split(".")
        if "blocks" in words and int(words[-1]) != number:
            del model.layers[name]
    return model


def _batches(wish: Wish, config: OtherConfig) -> list[Batch]:
    """A batch of one text, pair or image for each microbatch of all replicas."""
    random, count = np.random.default_rng(wish.seed), wish.layout.num_batches
    if wish.text is not None:
        return [_of_text(wish, config, random, count)]
    if isinstance(config, VisionConfig):
        if wish.tokens is not None:
            raise UsageError(f"--tokens {wish.tokens}: an image has as many as the model's patches; leave it out")
        return [_image(config, random) for _ in range(count)]
    tokens = 4 if wish.tokens is None else wish.tokens
    if tokens < 1:
        raise UsageError(f"--tokens must be at least 1, got {tokens}")
    if config.max_positions and tokens > config.max_positions:
        raise ConfigError(f"{tokens} tokens exceed the model's {config.max_positions} positions")
    made = (random.integers(0, config.vocab_size, tokens) for _ in range(count))
    if isinstance(config, EncoderDecoderConfig):
        return [_pair(config, ids, random.integers(0, config.vocab_size, max(tokens - 1, 1))) for ids in made]
    return [_masked_or_classes(config, ids, random) for ids in made]


def _of_text(wish: Wish, config: OtherConfig, random: np.random.Generator, count: int) -> Batch:
    if isinstance(config, VisionConfig):
        raise UsageError("--text is for models that read texts, and this one looks at images; leave it out")
    if wish.model is None:
        raise UsageError("--text needs the tokenizer of a model: give --model DIR, or --tokens N")
    if count > 1:
        raise UsageError(f"--text is one sequence, and this takes {count}: give --tokens N, or --microbatches 1")
    text, tokenizer = wish.text or "", load_tokenizer(wish.model)
    if isinstance(config, EncoderConfig):
        return _masked_or_classes(config, _ids(tokenizer, text), random)
    source, tab, target = text.partition("\t")
    if not tab:
        raise UsageError("--text of a model with an encoder and a decoder is a pair: source, a tab, and target")
    return _pair(config, _ids(tokenizer, source), _ids(tokenizer, target))


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    ids = tokenizer.encode(text)
    if not ids:
        raise UsageError(f"--text {text!r:.60} has no tokens")
    return np.array(ids, np.int64)


def _masked_or_classes(config: EncoderConfig, ids: np.ndarray, random: np.random.Generator) -> Batch:
    """A text, and what is to be said of it: of a masked model every other token, else classes."""
    if config.head == CLASSIFICATION:
        return Batch(ids, Rows.of([len(ids)]), random.integers(0, config.num_classes, 1))
    targets = random.integers(0, config.num_classes, len(ids))
    if config.head == MASKED:
        targets[1::2] = IGNORED
    return Batch(ids, Rows.of([len(ids)]), targets)


def _pair(config: EncoderDecoderConfig, source: np.ndarray, target: np.ndarray) -> Batch:
    given = np.append(config.start_id, target[:-1])
    return Batch(given, Rows.of([len(given)]), target, source=Batch(source, Rows.of([len(source)])))


def _image(config: VisionConfig, random: np.random.Generator) -> Batch:
    patches, width = config.grid[0] * config.grid[1], config.channels * config.patch_size**2
    pixels = random.standard_normal((patches, width)).astype(np.float32)
    return Batch(pixels, Rows.of([1 + patches]), random.integers(0, len(config.labels), 1))


def told_tokens(batch: Batch) -> str:
    """How much goes in, in words."""
    if batch.tokens.ndim == 2:
        return f"an image of {len(batch.tokens)} patches"
    tokens = f"{len(batch.tokens)} tokens"
    return tokens if batch.source is None else f"{len(batch.source.tokens)} tokens in, {len(batch.tokens)} out"


def _words(wish: Wish, config: OtherConfig, batches: Sequence[Batch]) -> dict[int, str]:
    """The text of every token that goes in or is to come out, where it is known."""
    if isinstance(config, VisionConfig):
        return {}
    both = [each for batch in batches for each in (batch, batch.source) if each is not None]
    ids = {
        int(i) for each in both for array in (each.tokens, each.targets) if array is not None for i in array if i >= 0
    }
    if wish.text is not None and wish.model is not None:
        tokenizer = load_tokenizer(wish.model)
        return {each: tokenizer.decode([each]) for each in sorted(ids)}
    is_tiny = wish.model is None and wish.config is None and config.vocab_size == len(WORDS)
    return {each: WORDS[each] for each in sorted(ids)} if is_tiny else {}


def dealt(units: int, ranks: int) -> str:
    """How many of so many units each rank has: "3+2+2"."""
    return "+".join(str(share_of(units, rank, ranks).size) for rank in range(ranks))


def _facts(config: OtherConfig, ranks: int) -> list[str]:
    """How the model is dealt to the ranks."""
    if isinstance(config, EncoderDecoderConfig):
        lines = [f"width {config.hidden_size}"]
        for name, side in (("encoder", config.encoder), ("decoder", config.decoder)):
            heads, columns = dealt(side.heads, ranks), dealt(side.ffn_hidden, ranks)
            lines.append(f"{name}: {side.heads} heads {heads}, {side.ffn_hidden} FFN columns {columns}")
    else:
        lines = [
            f"width {config.hidden_size}, {config.heads} heads of {config.head_dim} dealt {dealt(config.heads, ranks)}",
            f"{config.ffn_hidden} FFN columns {dealt(config.ffn_hidden, ranks)}",
        ]
    if isinstance(config, VisionConfig):
        return [*lines, f"{len(config.labels)} classes, {config.patch_size} x {config.patch_size} pixels a patch"]
    return [*lines, f"{config.vocab_size} vocabulary rows {dealt(config.vocab_size, ranks)}"]
