"""Classes of texts, or of each of their words, by an encoder that has such a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.data.tokenizer import Tokenizer
from mpitp.data.words import place_words
from mpitp.errors import ConfigError, NumericError
from mpitp.infer.embed import packs
from mpitp.models.batch import Batch
from mpitp.models.encoder import Encoder
from mpitp.models.encoder_config import CLASSIFICATION, TOKENS, EncoderConfig


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text; of each the class and its probability, None for one that was cut off or has no token."""

    words: tuple[str, ...]
    labels: tuple[tuple[str, float] | None, ...]


def check_has_classes(config: EncoderConfig, directory: str) -> None:
    """Raise ConfigError for an encoder without classes of texts or words."""
    if config.head not in (CLASSIFICATION, TOKENS):
        raise ConfigError(
            f'{directory} has no classes; mpitp train with [task] kind = "classification" or '
            '"token-classification" gives it some'
        )


def classes_of_texts(model: Encoder, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """softmax(logits) of texts of token ids, [n, classes], the same on every rank. A collective over its ranks."""
    found = np.empty((len(texts), len(model.config.labels)))
    for chosen in packs([len(text) for text in texts]):
        logits, _ = model.forward(Batch.of_lists([texts[i] for i in chosen]))
        found[chosen] = _softmax(to_host(model.gather_logits(logits)))
    return found


def classes_of_words(model: Encoder, tokenizer: Tokenizer, texts: Sequence[str], most: int) -> list[Words]:
    """The likeliest class of each word of texts, which blanks part; cut at `most` tokens. A collective as above."""
    words = [tuple(text.split()) for text in texts]
    placed, labels = place_words(tokenizer, words, most), model.config.labels
    found: list[Words] = [Words((), ())] * len(texts)
    for chosen in packs([len(each.ids) for each in placed]):
        batch = Batch.of_lists([placed[i].ids for i in chosen])
        probabilities = _softmax(to_host(model.gather_logits(model.forward(batch)[0])))
        for i, start in zip(chosen, batch.rows.first_rows(), strict=True):
            rows = [None if first is None else probabilities[start + first] for first in placed[i].firsts]
            best = [None if row is None else (labels[int(row.argmax())], float(row.max())) for row in rows]
            found[i] = Words(words[i], tuple(best))
    return found


def _softmax(logits: np.ndarray) -> np.ndarray:
    if not np.isfinite(logits).all():
        raise NumericError("some of the logits aren't finite; are the model's weights whole?")
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)
