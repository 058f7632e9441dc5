"""The task of an encoder that gives every word of a sentence a class: names, parts of speech (token classification).

A word's class is told by its first token; the others, and what the tokenizer puts around a text, have no target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from mpitp.backend.arrays import Array, from_host, to_host
from mpitp.comm.group import Group
from mpitp.config import RunConfig
from mpitp.data.sampler import windows_of
from mpitp.data.spans import counts_of, f1_of, marks_spans
from mpitp.data.tagged import TaggedTexts, read_tagged
from mpitp.data.tokenizer import check_rows
from mpitp.data.words import PlacedWords, place_words
from mpitp.errors import ConfigError, FileError
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows
from mpitp.models.batch import Batch
from mpitp.models.encoder_config import TOKENS, EncoderConfig
from mpitp.models.layered import LayeredModel
from mpitp.models.runner import Measure
from mpitp.train.deal import Deal
from mpitp.train.encoder_task import (
    EncoderTask,
    base_config,
    check_positions,
    head_notices,
    tokenizer_of,
    with_dropouts,
)
from mpitp.train.named_model import classes_of
from mpitp.train.setup import model_name
from mpitp.train.step import TrainStep
from mpitp.train.task import Judgement

NO_TARGET = -1


class TokensTask(EncoderTask):
    """A class for each word of labelled sentences."""

    model_config: EncoderConfig

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        if config.mesh.cp > 1 and config.data.valid is not None:
            raise ConfigError(
                "mesh.cp is not supported beside data.valid with task.kind = 'token-classification', whose spans are "
                "measured in whole sentences; use mesh.tp, sequence_parallel, dp and pp"
            )
        data = config.data
        self.texts = read_tagged(data.train)
        self.valid = None if data.valid is None else read_tagged(data.valid)
        self.tokenizer = tokenizer_of(config)
        base = base_config(config, self.tokenizer)
        self.classes = classes_of(base, TOKENS, self.texts)
        self.model_config = with_dropouts(config, base.with_head(TOKENS, self.classes))
        check_positions(config, self.model_config)
        self.targets = self.texts.targets(self.classes)
        self.valid_targets = [] if self.valid is None else self.valid.targets(self.classes)
        self.has_valid, self.files, self.sha256 = self.valid is not None, self.tokenizer.files, self.texts.sha256
        for placed in (self.placed, self.valid_placed):
            check_rows(self.tokenizer, [each.ids for each in placed], base.vocab_size, model_name(config))
        self._check_words()

    @cached_property
    def placed(self) -> list[PlacedWords]:
        """Tokens of the sentences to learn from."""
        return self._placed(self.texts)

    @cached_property
    def valid_placed(self) -> list[PlacedWords]:
        """Tokens of the held-out sentences."""
        return [] if self.valid is None else self._placed(self.valid)

    def _placed(self, texts: TaggedTexts) -> list[PlacedWords]:
        words = [sentence.words for sentence in texts.sentences]
        return place_words(self.tokenizer, words, self.config.data.seq_len)

    def _check_words(self) -> None:
        """Refuse a sentence of which no word is left."""
        for texts, placed in ((self.texts, self.placed), (self.valid, self.valid_placed)):
            for place, words in enumerate(placed):
                if texts is not None and all(first is None for first in words.firsts):
                    raise FileError(
                        f"{texts.path}, line {texts.sentences[place].line}: the tokenizer makes no token of the words "
                        f"of this sentence, or data.seq_len={self.config.data.seq_len} leaves none of them"
                    )

    def notices(self) -> Sequence[str]:
        every = [first for words in [*self.placed, *self.valid_placed] for first in words.firsts]
        lost = sum(first is None for first in every)
        notes = [
            f"{lost} of {len(every)} words are cut off at data.seq_len={self.config.data.seq_len}, or have no token: "
            "they are neither learnt nor measured"
        ]
        return [*head_notices(self.config, self.model_config), *(notes if lost else [])]

    def check(self, world: Group) -> None:
        """The files have been read whole."""

    def batch(self, samples: Sequence[int], places: Sequence[int], dropout: DropoutState | None) -> Batch:
        chosen = windows_of(samples, len(self.targets), self.config.train.seed).tolist()
        return _batch([self.placed[i] for i in chosen], [self.targets[i] for i in chosen], dropout, places)

    def whole_held_out(self, deal: Deal) -> Iterator[Batch]:
        micro, placed = self.config.train.micro_batch_size, self.valid_placed
        for number in deal.of(-(-len(placed) // micro)):
            chosen = slice(number * micro, (number + 1) * micro)
            yield _batch(placed[chosen], self.valid_targets[chosen])

    def judge(self, step: TrainStep, batches: Iterable[Batch]) -> Judgement:
        targets, (loss, right, *counts) = step.measure(batches, Measure(4, self._measured))
        return Judgement(loss / targets, right / targets, f1=f1_of(*counts))

    def _measured(self, model: LayeredModel, logits: Array, batch: Batch) -> tuple[float, ...]:
        """Right words, and spans that are right, found and wanted."""
        assert batch.targets is not None, "held-out batches have targets"
        counted = np.flatnonzero(batch.targets >= 0)
        whole = to_host(model.gather_logits(logits[from_host(counted, model.device.xp)]))
        found, wanted = whole.argmax(axis=1), batch.targets[counted]
        ends = np.searchsorted(counted, np.cumsum([run.length for run in batch.rows.runs]))
        as_spans, totals = marks_spans(self.classes), np.zeros(3)
        for own in np.split(np.arange(len(counted)), ends[:-1]):
            named = ([self.classes[i] for i in numbers[own]] for numbers in (wanted, found))
            totals += counts_of(*named, as_spans=as_spans)
        return (float((found == wanted).sum()), *map(float, totals))


def _batch(
    words: Sequence[PlacedWords],
    targets: Sequence[Sequence[int]],
    dropout: DropoutState | None = None,
    places: Sequence[int] = (),
) -> Batch:
    """Sentences of unequal length, with a target at each word's first token."""
    rows = Rows.of([len(each.ids) for each in words], samples=places)
    tokens = np.concatenate([np.asarray(each.ids, np.int64) for each in words])
    spread = [each.spread(own, NO_TARGET) for each, own in zip(words, targets, strict=True)]
    return Batch(tokens, rows, np.concatenate(spread), dropout)
