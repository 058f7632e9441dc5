"""Vectors of texts: what an encoder makes of a text's tokens, pooled to one row and, if wished, of length one.

    mean    e = sum of the rows of a text / their number           (Reimers & Gurevych 2019)
    cls     e = the first row
    normalized: e / |e|, so that a product of two is the cosine of their angle

Texts are packed without padding, of like lengths side by side, some thousand tokens a pass; a text's vector doesn't
depend on which others are with it, but for rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.errors import FileError, NumericError
from mpitp.files import read_json
from mpitp.models.batch import Batch
from mpitp.models.encoder import Encoder

PASS_TOKENS = 2048  # of one pass; measured: activations of a few hundred columns stay in the cache's reach


def embed(model: Encoder, texts: Sequence[Sequence[int]], pool: str = "mean", *, normalize: bool = False) -> np.ndarray:
    """Vectors [n, h] of texts of token ids, the same on every rank. A collective over the model's ranks."""
    vectors = np.empty((len(texts), model.config.hidden_size), model.dtype)
    for chosen in packs([len(text) for text in texts]):
        batch = Batch.of_lists([texts[i] for i in chosen])
        hidden, starts = to_host(model.hidden(batch)), batch.rows.first_rows()
        if pool == "mean":
            lengths = np.array([run.length for run in batch.rows.runs])[:, None]
            vectors[chosen] = np.add.reduceat(hidden, starts, axis=0) / lengths.astype(model.dtype)
        else:
            vectors[chosen] = hidden[starts]
    if not np.isfinite(vectors).all():
        raise NumericError("some of the vectors aren't finite; are the model's weights whole?")
    if normalize:
        vectors /= np.maximum(np.sqrt((vectors * vectors).sum(axis=1, keepdims=True)), 1e-12)
    return vectors


def packs(lengths: Sequence[int], most: int = PASS_TOKENS) -> Iterator[list[int]]:
    """Places of texts, the longest first, in packs of at most `most` tokens (one text at least).

    >>> list(packs([3, 9, 2, 4], most=8))
    [[1], [3, 0], [2]]
    """
    pack: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if pack and tokens + lengths[place] > most:
            yield pack
            pack, tokens = [], 0
        pack.append(place)
        tokens += lengths[place]
    if pack:
        yield pack


def default_pool(directory: str | Path) -> str:
    """What a directory of sentence-transformers says (1_Pooling/config.json); the mean where it says nothing."""
    path = Path(directory) / "1_Pooling" / "config.json"
    if not path.exists():
        return "mean"
    config = read_json(path)
    wished = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if wished and (len(wished) > 1 or wished[0] not in known):
        raise FileError(f"{path} asks for {', '.join(wished)}; supported are mean and cls: choose with --pool")
    return known[wished[0]] if wished else "mean"


def most_tokens(directory: str | Path, positions: int) -> int:
    """How long a text may be: as sentence_bert_config.json says, and no longer than the model's positions."""
    path = Path(directory) / "sentence_bert_config.json"
    wish = read_json(path).get("max_seq_length") if path.exists() else None
    return min(wish, positions) if isinstance(wish, int) and wish > 0 else positions


def as_json(text: str, vector: np.ndarray, *, ascii_only: bool) -> str:
    """One text as an object on a line of its own."""
    record: dict[str, Any] = {"text": text, "embedding": [float(x) for x in vector]}
    return json.dumps(record, ensure_ascii=ascii_only)
