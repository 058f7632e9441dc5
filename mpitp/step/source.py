"""Which model and which tokens are stepped through."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.load import ModelSource, load_config
from mpitp.comm.mesh import Mesh, abstract_mesh
from mpitp.comm.threads import run_threads
from mpitp.data.tokenizer import load_tokenizer
from mpitp.error_stream import tell
from mpitp.errors import ConfigError, UsageError
from mpitp.files import read_json
from mpitp.layers.partition import share_heads
from mpitp.layers.site import choose_blocks, make_site
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig, Dropouts
from mpitp.models.registry import config_from_hf
from mpitp.models.stages import Cutting
from mpitp.step.assemble import assemble
from mpitp.step.cuts import Sizes
from mpitp.step.film import Film
from mpitp.step.mesh_pass import record
from mpitp.step.others import WORDS, dealt, other_subject, told_tokens, with_overrides
from mpitp.step.wish import Subject, Wish

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
    "mixtral": {
        **_TINY,
        **{"model_type": "mixtral", "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 3},
        **{"num_local_experts": 3, "num_experts_per_tok": 2, "max_position_embeddings": 64, "rope_theta": 100.0},
        **{"output_router_logits": True, "router_aux_loss_coef": 0.1},
    },
}


def make_film(wish: Wish) -> Film:
    """Run one forward and backward pass on thread ranks and return every operation of it."""
    layout = wish.layout
    _check_zero(wish)
    ranks = wish.ranks if wish.ranks is not None else layout.others if layout.others > 1 else 3
    if ranks < 1:
        raise UsageError(f"-n must be at least 1, got {ranks}")
    meshes = [abstract_mesh(layout.sizes, rank, ranks) for rank in range(ranks)]
    subject = other_subject(wish, meshes[0]) or _subject(wish, meshes[0])
    tell(subject.config.notices)
    batches, config = subject.batches, subject.config
    if layout.ep > 1 and not (isinstance(config, DecoderConfig) and config.traits.mixture):
        raise UsageError(
            f"--ep {layout.ep} deals experts to ranks, and a {config.model_type} has none; try --preset mixtral, or "
            f"--dp {layout.ep} for replicas"
        )
    layout = dataclasses.replace(layout, blocks=choose_blocks(wish.invariant, 0, config.heads))
    layout.site_on(meshes[0])  # before anything runs: not all layouts have an invariant mode
    logs = run_threads(ranks, record, subject.make, batches, layout)
    film = assemble(_title(wish, subject, ranks), subject.facts, logs, _places(meshes))
    film.words, film.sizes, film.invariant = subject.words, subject.sizes, wish.invariant
    if isinstance(config, DecoderConfig) and _has_shared_heads(config, meshes[0].sizes["tp"], layout.blocks):
        _note_shared_heads(film)
    for op in film.ops:  # the blocks that were taken have their own numbers
        op.layer = re.sub(r"\bblocks\.(\d+)", lambda found: f"blocks.{int(found[1]) + subject.first_block}", op.layer)
    return film


def _check_zero(wish: Wish) -> None:
    """Raise UsageError for a ZeRO that the layout can't have."""
    layout = wish.layout
    if layout.zero and layout.dp * layout.ep * layout.cp == 1:
        raise UsageError(f"--zero {layout.zero} deals what replicas hold alike: give --dp, --ep or --cp too")
    if layout.zero > 1 and wish.invariant:
        raise UsageError(
            f"--zero {layout.zero} adds gradients rows by rows as they come, and --invariant needs the order of the "
            "microbatches: --zero 1 has it"
        )
    if layout.zero == 3 and layout.schedule == "zb" and layout.pp > 1:
        raise UsageError(
            "--zero 3 beside --schedule zb: weight gradients that are put off are made when whole weights are gone; "
            "take another schedule, or --zero 2"
        )


def _subject(wish: Wish, mesh: Mesh) -> Subject:
    """A model that continues text."""
    source = _source(wish)
    config = source.made_config
    source.check(make_site(mesh))
    batches = _batches(wish, config)
    sizes = Sizes.of(config, len(batches[0].tokens)).as_dict()
    words, facts = _words(wish, config, batches), _facts(config, mesh.sizes)
    return Subject(config, _where(wish, config), source.make, batches, facts, words, sizes, wish.block)


def make_films(wish: Wish, rank_counts: Sequence[int | None]) -> tuple[list[Film], list[str]]:
    """A film for each number of ranks; for several numbers, plain and invariant. Also why layouts are left out."""
    if len(rank_counts) == 1:
        return [make_film(dataclasses.replace(wish, ranks=rank_counts[0]))], []
    films, left_out = [], []
    is_plain_only = wish.layout.cp > 1 or wish.layout.sequence_parallel or wish.layout.zero > 1
    for ranks in rank_counts:
        for invariant in (False,) if is_plain_only else (False, True):
            try:
                films.append(make_film(dataclasses.replace(wish, ranks=ranks, invariant=invariant)))
            except ConfigError as error:
                if not invariant:
                    raise
                left_out.append(f"{ranks} ranks, invariant: {error}")
    return films, left_out


def _words(wish: Wish, config: DecoderConfig, batches: Sequence[Batch]) -> dict[int, str]:
    """The text of every token that goes in or is to come out, where there is a tokenizer, or words stand for ids."""
    arrays = [ids for batch in batches for ids in (batch.tokens, batch.targets) if ids is not None]
    ids = sorted({int(each) for array in arrays for each in array})
    if wish.text is not None and wish.model is not None:
        tokenizer = load_tokenizer(wish.model)
        return {each: tokenizer.decode([each]) for each in ids}
    is_tiny = wish.model is None and wish.config is None and config.vocab_size == len(WORDS)
    return {each: WORDS[each] for each in ids} if is_tiny else {}


def _has_shared_heads(config: DecoderConfig, ranks: int, blocks: int) -> bool:
    return bool(share_heads(config.heads, config.kv_heads, 0, ranks, blocks).kv_shared)


def _note_shared_heads(film: Film) -> None:
    """What the equation of dx doesn't say of KV heads on several ranks."""
    for op in film.ops:
        if op.layer.endswith("attention.qkv") and op.made.name == "dx_partial" and not op.collective:
            op.note += "; a KV head on several ranks counts on the rank that owns it"


def _where(wish: Wish, config: DecoderConfig) -> str:
    if wish.model is None:
        return f"{config.model_type}, fresh weights"
    last = wish.block + wish.layout.num_parts - 1
    return (
        f"block {wish.block} of {wish.model}" if wish.layout.pp == 1 else f"blocks {wish.block}-{last} of {wish.model}"
    )


def _title(wish: Wish, subject: Subject, ranks: int) -> str:
    batches = subject.batches
    title = f"{subject.where}, {ranks} rank{'s' * (ranks > 1)}, {told_tokens(batches[0])}"
    title += f" in each of {len(batches)} sequences" if len(batches) > 1 else ""
    title += f", {wish.layout.schedule}" if wish.layout.pp > 1 else ""
    title += f", ZeRO-{wish.layout.zero}" if wish.layout.zero else ""
    title += ", sequence-parallel" if wish.layout.sequence_parallel else ""
    return title + (", invariant" if wish.invariant else "")


def _places(meshes: Sequence[Mesh]) -> list[dict[str, int]]:
    """Where every rank stands along the axes that have several."""
    wide = [axis for axis, size in meshes[0].sizes.items() if size > 1]
    return [{axis: mesh.coordinates[axis] for axis in wide} for mesh in meshes]


def _source(wish: Wish) -> ModelSource:
    """Nothing is dropped."""
    cutting = Cutting(wish.layout.chunks)
    if wish.model is None:
        path = Path(wish.config or "")
        if path.suffix == ".toml":
            raise UsageError(f"--config {path}: step takes a config.json, such as that of a run's model, no run file")
        raw = (
            _deep(PRESETS[wish.preset], wish.layout.num_parts)
            if wish.config is None
            else read_json(path / "config.json" if path.is_dir() else path)
        )
        own = [text.partition("=")[0] for text in wish.overrides]
        fresh = config_from_hf(with_overrides(raw, wish.overrides), own)
        return ModelSource(dataclasses.replace(fresh, dropouts=Dropouts()), seed=wish.seed, cutting=cutting)
    whole = dataclasses.replace(load_config(wish.model), dropouts=Dropouts())
    if not 0 <= wish.block < whole.num_layers:
        raise UsageError(f"--block {wish.block}: the model has the blocks 0 to {whole.num_layers - 1}")
    last = wish.block + wish.layout.num_parts
    if last > whole.num_layers:
        raise UsageError(
            f"--block {wish.block}: {wish.layout.num_parts} parts of a pipeline take as many blocks, and the model "
            f"ends with block {whole.num_layers - 1}"
        )
    return ModelSource(whole, Path(wish.model), blocks=range(wish.block, last), cutting=cutting)


def _deep(preset: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """The preset with a block for each part of a pipeline."""
    key = "n_layer" if "n_layer" in preset else "num_hidden_layers"
    return {**preset, key: parts}


def _batches(wish: Wish, config: DecoderConfig) -> list[Batch]:
    """The sequences of all microbatches of all replicas, each by itself, with their next tokens."""
    count, least = wish.layout.num_batches, wish.layout.least_tokens
    if wish.text is not None:
        if wish.model is None:
            raise UsageError("--text needs the tokenizer of a model: give --model DIR, or --tokens N")
        if count > 1:
            raise UsageError(f"--text is one sequence, and this takes {count}: give --tokens N, or --microbatches 1")
        ids = np.array([load_tokenizer(wish.model).encode(wish.text)], np.int64)
        if ids.size < 2:
            raise UsageError("--text must be at least two tokens long: one to read, one to predict")
    else:
        tokens = max(4, least) if wish.tokens is None else wish.tokens
        if tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {tokens}")
        ids = np.random.default_rng(wish.seed).integers(0, config.vocab_size, (count, tokens + 1))
    length = ids.shape[1] - 1
    if length > config.max_positions:
        raise ConfigError(f"{length} tokens exceed the model's {config.max_positions} positions")
    if length < least:
        raise UsageError(f"{length} tokens can't be cut over --cp {wish.layout.cp}: it takes {least} at least")
    return [Batch.of_rows(row[None, :-1], row[None, 1:]) for row in ids]


def _facts(config: DecoderConfig, sizes: Mapping[str, int]) -> list[str]:
    """How the model is dealt to the ranks."""
    ranks = sizes["tp"]
    held = [share_heads(config.heads, config.kv_heads, rank, ranks).kv for rank in range(ranks)]
    kv = " ".join("{" + ",".join(map(str, each)) + "}" for each in held)
    return [
        f"width {config.hidden_size}, {config.heads} heads of {config.head_dim} dealt {dealt(config.heads, ranks)}",
        f"{config.kv_heads} KV heads: {kv}",
        f"{config.ffn_hidden} FFN columns {dealt(config.ffn_hidden, ranks)}",
        f"{config.vocab_size} vocabulary rows {dealt(config.vocab_size, ranks)}",
        *_of_experts(config, sizes["ep"]),
    ]


def _of_experts(config: DecoderConfig, ranks: int) -> list[str]:
    mixture = config.traits.mixture
    if mixture is None:
        return []
    over = f" dealt {dealt(mixture.num_experts, ranks)} over ep" if ranks > 1 else ""
    return [f"{mixture.num_experts} experts{over}, {mixture.top_k} a token"]
