"""Encoders, vision transformers, and models with an encoder and a decoder, to be stepped through."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.encoder import load_encoder_config
from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource, load_encoder_decoder_config
from mpitp.checkpoint.encoder_source import EncoderSource
from mpitp.checkpoint.hf_directory import read_config
from mpitp.checkpoint.vision import load_vision_config
from mpitp.comm.mesh import Mesh
from mpitp.data.tokenizer import Tokenizer, load_tokenizer
from mpitp.errors import ConfigError, UsageError
from mpitp.files import read_json
from mpitp.layers.partition import piece_of, share_of
from mpitp.layers.rows import Rows
from mpitp.layers.site import Site, make_site
from mpitp.models.batch import IGNORED, Batch
from mpitp.models.config import Dropouts
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, MASKED, EncoderConfig
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig, PairDropouts
from mpitp.models.encoder_decoders import encoder_decoder_config_from_hf
from mpitp.models.encoders import encoder_config_from_hf
from mpitp.models.kinds import is_encoder, is_encoder_decoder, is_vision
from mpitp.models.layered import LayeredModel
from mpitp.models.stages import Cutting
from mpitp.models.vision_config import VisionConfig, vision_config_from_hf
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


def other_subject(wish: Wish, mesh: Mesh) -> Subject | None:
    """What the wish names, if it is no model that continues text."""
    config = _config(wish)
    if config is None:
        return None
    directory = None if wish.model is None else Path(wish.model)
    parts = wish.layout.num_parts
    cutting = Cutting(wish.layout.chunks)
    if directory is not None and parts > 1:
        cutting = replace(cutting, blocks=_cut_around(wish, config))
    source: EncoderDecoderSource | EncoderSource
    if isinstance(config, EncoderDecoderConfig):
        source = EncoderDecoderSource(config, directory, wish.seed, cutting=cutting)
    else:
        source = EncoderSource(config, directory, wish.seed, cutting=cutting)

    source.check(make_site(mesh))

    def make(site: Site) -> LayeredModel:
        model = source.make(site)
        return model if directory is None else with_blocks(model, wish.block, _blocks_a_side(config, parts))

    batches = _batches(wish, config)
    for batch in batches:
        _check_lengths(wish, batch)
    facts, words = _facts(config, mesh.sizes["tp"]), _words(wish, config, batches)
    return Subject(config, _where(wish, config), make, batches, facts, words)


def _where(wish: Wish, config: OtherConfig) -> str:
    """What the title calls the model."""
    if wish.model is None:
        return f"{config.model_type}, fresh weights"
    last = wish.block + _blocks_a_side(config, wish.layout.num_parts) - 1
    blocks = f"block {wish.block}" if last == wish.block else f"blocks {wish.block}-{last}"
    return f"{blocks} of {wish.model}"


def _blocks_a_side(config: OtherConfig, parts: int) -> int:
    """How many blocks are taken of a directory's model, of each side of one that has two: one a part of a pipeline."""
    return -(-parts // 2) if isinstance(config, EncoderDecoderConfig) else parts


def _config(wish: Wish) -> OtherConfig | None:
    """Of the model, with a head and without dropout; None: it continues text."""
    if wish.model is not None:
        config = _stored(wish.model)
        if config is not None:
            _check_blocks(wish, config)
    else:
        config = _fresh(wish)
    if config is None:
        return None
    if isinstance(config, EncoderDecoderConfig):
        return replace(config, dropouts=PairDropouts())
    if config.head == FEATURES:  # so that there is a loss
        config = config.with_head(CLASSIFICATION, [f"LABEL_{i}" for i in range(_CLASSES_OF_A_NEW_HEAD)])
    if isinstance(config, EncoderConfig):
        config = replace(config, head_dropout=0.0)
    return replace(config, dropouts=Dropouts())


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
        raw = _deep(OTHER_PRESETS.get(wish.preset, {}), wish.layout.num_parts)
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


def _deep(preset: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """The preset with a block for each part of a pipeline; where it has two sides, with as many on both."""
    both = {key for key in ("num_layers", "encoder_layers", "decoder_layers") if key in preset}
    each = -(-parts // 2) if both else parts
    return {**preset, **dict.fromkeys(both or {"num_hidden_layers"} & set(preset), each)}


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


def _check_blocks(wish: Wish, config: OtherConfig) -> None:
    if isinstance(config, EncoderDecoderConfig):
        whose, count = "encoder and decoder both have", min(config.encoder.num_layers, config.decoder.num_layers)
    else:
        whose, count = "the model has", config.num_layers
    if not 0 <= wish.block < count:
        raise UsageError(f"--block {wish.block}: {whose} the blocks 0 to {count - 1}")
    parts = wish.layout.num_parts
    if wish.block + (taken := _blocks_a_side(config, parts)) > count:
        raise UsageError(
            f"--block {wish.block}: {parts} parts of a pipeline take {taken} blocks from there on, and {whose} the "
            f"blocks 0 to {count - 1}"
        )


def _cut_around(wish: Wish, config: OtherConfig) -> tuple[int, ...]:
    """How many of all blocks each part of a pipeline has, so that those which are taken are dealt evenly: a part ends
    behind the last one that it has of them, the last part with the model.
    """
    if isinstance(config, EncoderDecoderConfig):
        sides = [config.encoder.num_layers, config.decoder.num_layers]
    else:
        sides = [config.num_layers]
    parts = wish.layout.num_parts
    own = range(wish.block, wish.block + _blocks_a_side(config, parts))
    taken = [sum(sides[:side]) + block for side in range(len(sides)) for block in own]
    ends = [taken[piece_of(len(taken), part, parts).stop - 1] + 1 for part in range(parts - 1)]
    return tuple(end - start for start, end in pairwise([0, *ends, sum(sides)]))


def with_blocks(model: LayeredModel, first: int, count: int) -> LayeredModel:
    """The model with so many of its blocks from `first` on (of each side, where it has two)."""

    def stays(name: str) -> bool:
        words = name.split(".")
        return "blocks" not in words or int(words[-1]) in range(first, first + count)

    def those(names: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in names if stays(name))

    model.layers = {name: layer for name, layer in model.layers.items() if stays(name)}
    model.chunks = [replace(chunk, names=those(chunk.names)) for chunk in model.chunks]
    model.stage_layers = [those(names) for names in model.stage_layers]
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
    is_pair = isinstance(config, EncoderDecoderConfig)
    tokens = max(4, wish.layout.least_tokens + is_pair) if wish.tokens is None else wish.tokens
    if tokens < 1:
        raise UsageError(f"--tokens must be at least 1, got {tokens}")
    if config.max_positions and tokens > config.max_positions:
        raise ConfigError(f"{tokens} tokens exceed the model's {config.max_positions} positions")
    made = (random.integers(0, config.vocab_size, tokens) for _ in range(count))
    if isinstance(config, EncoderDecoderConfig):
        return [_pair(config, ids, random.integers(0, config.vocab_size, max(tokens - 1, 1))) for ids in made]
    return [_masked_or_classes(config, ids, random) for ids in made]


def _check_lengths(wish: Wish, batch: Batch) -> None:
    """Raise UsageError for what is too short to be cut over cp."""
    least = wish.layout.least_tokens
    for each in (batch, batch.source):
        if each is not None and each.rows.num_tokens < least:
            cure = "; an image has more with a larger --set image_size" if batch.tokens.ndim == 2 else ""
            raise UsageError(
                f"{each.rows.num_tokens} tokens can't be cut over --cp {wish.layout.cp}: it takes {least} at least"
                f"{cure}"
            )


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
