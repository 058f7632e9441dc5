"""Which model and which tokens are stepped through."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.load import ModelSource, load_config
from mpitp.comm.threads import run_threads
from mpitp.data.tokenizer import load_tokenizer
from mpitp.error_stream import tell
from mpitp.errors import ConfigError, UsageError
from mpitp.files import read_json
from mpitp.layers.partition import share_heads, share_of
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig, Dropouts
from mpitp.models.registry import config_from_hf
from mpitp.step.film import Film, assemble
from mpitp.step.record import record_pass

# Small enough to see every number, uneven on 3 ranks, with a KV head that two ranks use.
_TINY = {"vocab_size": 11, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 4, "initializer_range": 0.5}
PRESETS: dict[str, dict[str, Any]] = {
    "llama": {
        **_TINY,
        **{"model_type": "llama", "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 5},
        **{"max_position_embeddings": 64, "rope_theta": 100.0},
    },
    "gpt2": {
        **{"model_type": "gpt2", "vocab_size": 11, "n_embd": 6, "n_head": 3, "n_layer": 1, "n_inner": 7},
        **{"n_positions": 64, "initializer_range": 0.5, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    },
    "qwen2": {
        **_TINY,
        **{"model_type": "qwen2", "head_dim": 2, "num_key_value_heads": 2, "intermediate_size": 5},
        **{"max_position_embeddings": 64, "rope_theta": 100.0, "tie_word_embeddings": True},
    },
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says; `model` is a directory, of which one block is taken."""

    ranks: int = 3
    preset: str = "llama"
    config: str | None = None
    overrides: tuple[str, ...] = ()
    model: str | None = None
    block: int = 0
    tokens: int = 4
    text: str | None = None
    sequence_parallel: bool = False
    seed: int = 0


def make_film(wish: Wish) -> Film:
    """Run one forward and backward pass on thread ranks and return every operation of it."""
    if wish.ranks < 1:
        raise UsageError(f"-n must be at least 1, got {wish.ranks}")
    source = _source(wish)
    config = source.made_config
    tell(config.notices)
    batch = _batch(wish, config)
    record = partial(record_pass, sequence_parallel=wish.sequence_parallel)
    logs = run_threads(wish.ranks, record, source.make, batch)
    where = f"block {wish.block} of {wish.model}" if wish.model is not None else f"{config.model_type}, fresh weights"
    plural = "s" * (wish.ranks > 1)
    title = f"{where}, {wish.ranks} rank{plural}, {len(batch.tokens)} tokens"
    title += ", sequence-parallel" if wish.sequence_parallel else ""
    film = assemble(title, _facts(config, wish.ranks), logs)
    for op in film.ops:  # the block that was taken has its own number
        op.layer = op.layer.replace("blocks.0", f"blocks.{wish.block}", 1)
    return film


def _source(wish: Wish) -> ModelSource:
    """Nothing is dropped."""
    if wish.model is None:
        path = Path(wish.config or "")
        if path.suffix == ".toml":
            raise UsageError(f"--config {path}: step takes a config.json, such as that of a run's model, no run file")
        raw = (
            PRESETS[wish.preset] if wish.config is None else read_json(path / "config.json" if path.is_dir() else path)
        )
        own = [text.partition("=")[0] for text in wish.overrides]
        fresh = config_from_hf(_with_overrides(raw, wish.overrides), own)
        return ModelSource(dataclasses.replace(fresh, dropouts=Dropouts()), seed=wish.seed)
    whole = dataclasses.replace(load_config(wish.model), dropouts=Dropouts())
    if not 0 <= wish.block < whole.num_layers:
        raise UsageError(f"--block {wish.block}: the model has the blocks 0 to {whole.num_layers - 1}")
    return ModelSource(whole, Path(wish.model), blocks=range(wish.block, wish.block + 1))


def _with_overrides(raw: Mapping[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
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


def _batch(wish: Wish, config: DecoderConfig) -> Batch:
    """One sequence and its next tokens."""
    if wish.text is not None:
        if wish.model is None:
            raise UsageError("--text needs the tokenizer of a model: give --model DIR, or --tokens N")
        ids = np.array([load_tokenizer(wish.model).encode(wish.text)], np.int64)
        if ids.size < 2:
            raise UsageError("--text must be at least two tokens long: one to read, one to predict")
    else:
        if wish.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {wish.tokens}")
        ids = np.random.default_rng(wish.seed).integers(0, config.vocab_size, (1, wish.tokens + 1))
    if ids.size - 1 > config.max_positions:
        raise ConfigError(f"{ids.size - 1} tokens exceed the model's {config.max_positions} positions")
    return Batch.of_rows(ids[:, :-1], ids[:, 1:])


def _facts(config: DecoderConfig, ranks: int) -> list[str]:
    """How the model is dealt to the ranks."""

    def dealt(units: int) -> str:
        return "+".join(str(share_of(units, rank, ranks).size) for rank in range(ranks))

    held = [share_heads(config.heads, config.kv_heads, rank, ranks).kv for rank in range(ranks)]
    kv = " ".join("{" + ",".join(map(str, each)) + "}" for each in held)
    return [
        f"width {config.hidden_size}, {config.heads} heads of {config.head_dim} dealt {dealt(config.heads)}",
        f"{config.kv_heads} KV heads: {kv}",
        f"{config.ffn_hidden} FFN columns {dealt(config.ffn_hidden)}",
        f"{config.vocab_size} vocabulary rows {dealt(config.vocab_size)}",
    ]
