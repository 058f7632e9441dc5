r"""Perplexity: how many tokens a model hesitates between, in the geometric mean over a text.

    perplexity = exp(- mean over scored tokens of log p(token | those before it in its window))

A text longer than the model's positions is read in windows that begin `stride` tokens apart. Each window scores the
tokens that no earlier one has scored; the others are its context. So every token but the first is scored once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.errors import ConfigError, NumericError
from mpitp.models.batch import IGNORED, Batch
from mpitp.models.model import CausalLM


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens first .. first + length are read; the `scored` last of the `length` next tokens count."""

    first: int
    length: int
    scored: int


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of one text. `loss`: nats a token; `num_bytes`: of the text in UTF-8."""

    loss: float
    num_tokens: int  # that were scored
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_a_byte(self) -> float:
        """What the text would take, compressed by the model: comparable between tokenizers."""
        return self.loss * self.num_tokens / math.log(2) / max(self.num_bytes, 1)


@dataclass(frozen=True, slots=True)
class Windows:
    """How a text is read: windows of `length` tokens, `stride` apart, so many at a time."""

    length: int
    stride: int
    batch_size: int = 4

    def of(self, num_tokens: int) -> Iterator[Window]:
        """The windows of a text; all but the last read `length` tokens."""
        scored_to = 0  # of the num_tokens - 1 next tokens
        for first in range(0, max(num_tokens - 1, 0), self.stride):
            end = min(first + self.length, num_tokens - 1)
            yield Window(first, end - first, end - max(scored_to, first))
            scored_to = end
            if end == num_tokens - 1:
                return


def perplexity(
    model: CausalLM,
    ids: Sequence[int],
    num_bytes: int,
    windows: Windows,
    progress: Callable[[int], object] | None = None,
) -> Perplexity:
    """Of the text `ids`; a collective over the model's ranks. progress is called with the tokens scored by each batch.

    Raises ConfigError for a text without a token to predict, NumericError for a loss that is no number.
    """
    if len(ids) < 2:
        raise ConfigError(f"a text of {len(ids)} token(s) has nothing to predict; at least 2 are needed")
    tokens, todo, total, count = np.asarray(ids, np.int64), list(windows.of(len(ids))), 0.0, 0
    for i in range(0, len(todo), windows.batch_size):
        batch = _batch(tokens, todo[i : i + windows.batch_size])
        total += model.loss_of(model.forward(batch)[0], batch)[0]  # without auxiliary losses
        count += batch.num_targets
        if progress is not None:
            progress(batch.num_targets)
    if not math.isfinite(total):  # equal on every rank
        raise NumericError("the loss is not finite: the model's weights are damaged, or overflow in this dtype")
    return Perplexity(total / count, count, num_bytes)


def _batch(tokens: np.ndarray, some: Sequence[Window]) -> Batch:
    """Windows one after the other, whatever their lengths."""
    batch = Batch.of_lists([tokens[w.first : w.first + w.length].tolist() for w in some])
    targets = []
    for window in some:
        after = tokens[window.first + 1 : window.first + 1 + window.length].copy()
        after[: window.length - window.scored] = IGNORED
        targets.append(after)
    return Batch(batch.tokens, batch.rows, np.concatenate(targets))
