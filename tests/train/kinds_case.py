"""Every kind of task but the next token, small: its data, its models, and a run file of any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mpitp.cli import main
from mpitp.config import RunConfig, run_config_from
from mpitp.data.tokenizer import byte_tokenizer
from tests.train.layouts import COMMON, STEPS, Arrays, compare, found_in, new_folder, scratch
from tests.train.run_case import changed, run

Changes = Mapping[str, Any]

_TEXT = {"hidden_size": 12, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 19}
_BERT_LIKE = {**_TEXT, "max_position_embeddings": 24, "initializer_range": 0.2}
_IMAGE = {**_TEXT, "image_size": 7, "patch_size": 2, "num_channels": 1, "initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **_BERT_LIKE},
    "roberta": {"model_type": "roberta", **_BERT_LIKE},
    "distilbert": {
        **{"model_type": "distilbert", "dim": 12, "n_layers": 4, "n_heads": 3, "hidden_dim": 19},
        **{"max_position_embeddings": 24, "initializer_range": 0.2},
    },
    "vit": {"model_type": "vit", **_IMAGE, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "dinov2": {"model_type": "dinov2", **{k: v for k, v in _IMAGE.items() if k != "intermediate_size"}},
}
_SIDES = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3, "decoder_attention_heads": 2}
MODELS |= {
    "t5": {
        **{"model_type": "t5", "d_model": 12, "d_kv": 4, "num_heads": 3, "d_ff": 10, "num_layers": 2},
        **{"num_decoder_layers": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
    },
    "bart": {
        **{"model_type": "bart", "d_model": 12, "max_position_embeddings": 16, "encoder_ffn_dim": 9, **_SIDES},
        **{"decoder_ffn_dim": 10, "activation_dropout": 0.1, "attention_dropout": 0.1, "init_std": 0.2},
    },
}
KINDS = {
    **{"bert": "masked", "roberta": "classification", "distilbert": "classification"},
    **{"vit": "image", "dinov2": "image", "t5": "translation", "bart": "translation"},
}


def check(
    model: str, ranks: int, mesh: Changes, layout: Changes | None = None, tolerance: float = 1e-10, **same: Any
) -> None:
    """Train on `ranks` thread ranks and on one, with what is alike in both, and compare every number and tensor."""
    settings = settings_of(model, {**same, **(layout or {})}, mesh)
    run(ranks, settings)
    compare(found_in(settings), on_one_rank(model, tuple(sorted(same.items()))), tolerance)


def check_resumed(model: str, *layouts: tuple[int, Changes, Changes], **same: Any) -> None:
    """Train a step on each of the layouts, each going on from the one before, and compare with one rank."""
    same = {"optim_schedule": "constant", "train_steps": len(layouts), "train_eval_every": 1, **same}
    folder = new_folder()
    for step, (ranks, mesh, layout) in enumerate(layouts, 1):
        settings = settings_of(model, {**same, **layout, "train_steps": step}, mesh, folder)
        run(ranks, settings, resume="auto")
    compare(found_in(settings), on_one_rank(model, tuple(sorted(same.items()))), 1e-10)


@cache
def on_one_rank(model: str, same: tuple[tuple[str, Any], ...]) -> Arrays:
    settings = settings_of(model, dict(same), {})
    run(1, settings)
    return found_in(settings)


def settings_of(model: str, changes: Changes, mesh: Changes, run_dir: Path | None = None) -> RunConfig:
    """Three steps of four microbatches of one sample, held-out data looked at in the last."""
    raw: dict[str, Any] = {
        "model": dict(MODELS[model]),
        "task": {"kind": KINDS[model]},
        "data": dict(data_of(KINDS[model])),
        "train": {"run_dir": str(run_dir or new_folder())},
        "optim": {"lr": 1e-2},
        "mesh": dict(mesh),
        "checkpoint": {},
    }
    changes = {**COMMON, "train_global_batch_size": 4, "train_eval_every": STEPS, **changes}
    return run_config_from(changed(raw, changes))


@cache
def data_of(kind: str) -> dict[str, Any]:
    """The [data] of a kind; made once."""
    folder = scratch() / kind
    folder.mkdir()
    if kind == "masked":
        return _prepared(folder)
    paths = {part: folder / f"{part}.{'npz' if kind == 'image' else 'tsv'}" for part in ("train", "valid")}
    for (part, path), count in zip(paths.items(), (30, 5), strict=True):
        rng = np.random.default_rng(count)
        if kind == "image":
            pixels = rng.integers(0, 255, (count, 7, 7), dtype=np.uint8)
            np.savez(path, images=pixels, labels=rng.integers(0, 3, count) if part == "valid" else np.arange(count) % 3)
        else:
            labels = [_word(rng) if kind == "translation" else "abc"[i % 3] for i in range(count)]
            path.write_text("".join(f"{label}\t{_word(rng)}\n" for label in labels))
    data: dict[str, Any] = {part: str(path) for part, path in paths.items()}
    return data if kind == "image" else {**data, "tokenizer": "bytes", "seq_len": 9}


def _word(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list("abcd"), int(rng.integers(1, 8))))


def _prepared(folder: Path) -> dict[str, Any]:
    data = prepare_for_masking(folder, "abcabdabe" * 60)
    paths = {part: str(data / part) for part in ("train", "valid")}
    return {**paths, "valid_sequences": 3, "seq_len": 9}


def prepare_for_masking(folder: Path, text: str) -> Path:
    """Prepared data of a text, for a byte tokenizer with a mask token."""
    files = byte_tokenizer().files
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    backend.add_special_tokens(["[MASK]"])
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(backend.to_str())
    named = json.loads(files["tokenizer_config.json"]) | {"mask_token": "[MASK]"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "text").write_text(text)
    words = ["data", "prepare", str(folder / "text"), "--tokenizer", str(folder / "tokenizer")]
    assert main([*words, "--out", str(folder / "data"), "--valid-fraction", "0.1"]) == 0
    return folder / "data"
