"""The tasks of encoders: classes of labelled texts, and hidden tokens of prepared text."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from mpitp.backend.arrays import Array, from_host, to_host
from mpitp.checkpoint.encoder import load_encoder_config
from mpitp.checkpoint.encoder_source import EncoderSource
from mpitp.comm.group import Group
from mpitp.config import RunConfig
from mpitp.data.labelled import LabelledTexts, read_labelled
from mpitp.data.masking import Masking
from mpitp.data.sampler import windows_of
from mpitp.data.tokenizer import Tokenizer, check_fits, check_rows, load_tokenizer, tokenizer_from
from mpitp.errors import ConfigError
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows
from mpitp.models.batch import Batch
from mpitp.models.encoder_config import CLASSIFICATION, MASKED, EncoderConfig
from mpitp.models.encoders import encoder_config_from_hf
from mpitp.models.layered import LayeredModel
from mpitp.models.runner import Measure
from mpitp.models.vision_config import VisionConfig
from mpitp.train.deal import Deal
from mpitp.train.named_model import classes_of, named_config
from mpitp.train.setup import (
    RunData,
    check_texts,
    dropouts_of,
    model_name,
    num_microbatches,
    open_data,
    run_cutting,
    run_notices,
)
from mpitp.train.step import TrainStep
from mpitp.train.task import Judgement, Task


def head_notices(config: RunConfig, model: EncoderConfig) -> list[str]:
    """What is said of the model, and of a head that begins anew."""
    lines, directory = list(model.notices), config.model.from_
    if directory is not None:
        stored = load_encoder_config(directory)
        if (stored.head, stored.labels) != (model.head, model.labels):
            lines.append(f"{directory} has no such head: what it lacks of one begins from train.seed")
    return lines


class EncoderTask(Task):
    """What both have in common; `model_config` is set by each."""

    model_config: EncoderConfig | VisionConfig

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    def source(self) -> EncoderSource:
        directory = None if self.config.model.from_ is None else Path(self.config.model.from_)
        return EncoderSource(
            self.model_config,
            directory,
            self.config.train.seed,
            cutting=run_cutting(self.config),
            deals_weights=self.config.optim.zero == 3,
            recompute=self.config.train.recompute,
        )

    def step_batches(self, step: int, deal: Deal) -> list[Batch]:
        size, micro = self.config.global_batch_size, self.config.train.micro_batch_size
        drops = any(dataclasses.astuple(self.model_config.dropouts)) or self.model_config.head_dropout
        state = DropoutState(self.config.train.seed, step) if drops else None
        batches = []
        for number in deal.of(num_microbatches(self.config)):
            places = range(number * micro, min((number + 1) * micro, size))
            batch = self.batch([(step - 1) * size + place for place in places], places, state)
            batches.append(batch.cut(*deal.piece))
        return batches

    def held_out_batches(self, deal: Deal) -> Iterator[Batch]:
        return (batch.cut(*deal.piece) for batch in self.whole_held_out(deal))

    @abstractmethod
    def whole_held_out(self, deal: Deal) -> Iterator[Batch]:
        """The microbatches of held-out data, each of whole samples, of this rank and those with other parts of them."""

    @abstractmethod
    def batch(self, samples: Sequence[int], places: Sequence[int], dropout: DropoutState | None) -> Batch:
        """The samples with these numbers; `places`: theirs in the step's global batch."""

    def judge(self, step: TrainStep, batches: Iterable[Batch]) -> Judgement:
        return judge(step, batches)


class ClassificationTask(EncoderTask):
    """A class for each labelled text."""

    model_config: EncoderConfig

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        data = config.data
        self.texts = read_labelled(data.train)
        self.valid = None if data.valid is None else read_labelled(data.valid)
        self.tokenizer = tokenizer_of(config)
        base = base_config(config, self.tokenizer)
        classes = classes_of(base, CLASSIFICATION, self.texts)
        self.model_config = with_dropouts(config, base.with_head(CLASSIFICATION, classes))
        check_positions(config, self.model_config)
        self.targets = self.texts.targets(classes)
        self.valid_targets = [] if self.valid is None else self.valid.targets(classes)
        self.has_valid, self.files, self.sha256 = self.valid is not None, self.tokenizer.files, self.texts.sha256
        for texts in (self.encoded, self.valid_encoded):
            check_rows(self.tokenizer, texts, base.vocab_size, model_name(config))

    @cached_property
    def encoded(self) -> list[list[int]]:
        """Token ids of the texts to learn from."""
        return encode(self.tokenizer, self.texts, self.config.data.seq_len)

    @cached_property
    def valid_encoded(self) -> list[list[int]]:
        """Those of the held-out texts."""
        return [] if self.valid is None else encode(self.tokenizer, self.valid, self.config.data.seq_len)

    def notices(self) -> Sequence[str]:
        count, seq_len = len(self.texts.texts), self.config.data.seq_len
        cut = sum(len(ids) >= seq_len for ids in self.encoded)
        notes = [f"{cut} of {count} texts have data.seq_len={seq_len} tokens or more; what is behind is cut off"]
        return [*head_notices(self.config, self.model_config), *(notes if cut else [])]

    def check(self, world: Group) -> None:
        """The file has been read whole."""

    def batch(self, samples: Sequence[int], places: Sequence[int], dropout: DropoutState | None) -> Batch:
        lines = windows_of(samples, len(self.targets), self.config.train.seed)
        texts, targets = [self.encoded[i] for i in lines], [self.targets[i] for i in lines]
        return texts_batch(texts, targets, dropout, places)

    def whole_held_out(self, deal: Deal) -> Iterator[Batch]:
        micro, texts = self.config.train.micro_batch_size, self.valid_encoded
        for number in deal.of(-(-len(texts) // micro)):
            chosen = slice(number * micro, (number + 1) * micro)
            yield texts_batch(texts[chosen], self.valid_targets[chosen])


class MaskedTask(EncoderTask):
    """The hidden tokens of prepared text."""

    model_config: EncoderConfig

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.data: RunData = open_data(config)
        tokenizer = self.data.tokenizer
        if tokenizer.mask_id is None:
            raise ConfigError(
                f"the tokenizer of {config.data.train} has no mask token (special_tokens_map.json: mask_token), which "
                'task.kind = "masked" puts in the place of what is hidden'
            )
        self.model_config = with_dropouts(config, base_config(config, tokenizer).with_head(MASKED))
        check_positions(config, self.model_config)
        special = tuple(sorted(tokenizer.special_tokens))
        rate, seed, vocab = config.task.mask_rate, config.train.seed, self.data.vocab_size
        self.masking = Masking(rate, tokenizer.mask_id, vocab, special, seed)
        self.has_valid, self.files = self.data.valid is not None, tokenizer.files
        self.sha256 = self.data.train.tokens.manifest.sha256

    def notices(self) -> Sequence[str]:
        return [*head_notices(self.config, self.model_config), *run_notices(self.config, self.data)]

    def check(self, world: Group) -> None:
        check_texts(world, self.data, self.model_config.vocab_size, model_name(self.config))

    def batch(self, samples: Sequence[int], places: Sequence[int], dropout: DropoutState | None) -> Batch:
        tokens, _ = self.data.train.batch(samples)
        return Batch.of_rows(*self.masking.apply(tokens, samples), dropout, samples=places)

    def whole_held_out(self, deal: Deal) -> Iterator[Batch]:
        sampler, micro = self.data.valid, self.config.train.micro_batch_size
        assert sampler is not None, "asked for where there is one"
        masking = dataclasses.replace(self.masking, name="valid")
        wanted = min(self.config.data.valid_sequences or sampler.num_windows, sampler.num_windows)
        for number in deal.of(-(-wanted // micro)):
            samples = range(number * micro, min((number + 1) * micro, wanted))
            yield Batch.of_rows(*masking.apply(sampler.batch(samples)[0], samples))


def judge(step: TrainStep, batches: Iterable[Batch]) -> Judgement:
    """Mean loss and part of right choices over all ranks' batches. A collective over the ranks of the model."""
    targets, (loss, right) = step.measure(batches, Measure(1, right_choices))
    return Judgement(loss / targets, right / targets)


def right_choices(model: LayeredModel, logits: Array, batch: Batch) -> tuple[float]:
    """How many counted targets have the largest logit."""
    assert batch.targets is not None, "held-out batches have targets"
    counted = np.flatnonzero(batch.targets >= 0)
    whole = to_host(model.gather_logits(logits[from_host(counted, model.device.xp)]))
    return (float((whole.argmax(axis=1) == batch.targets[counted]).sum()),)


def base_config(config: RunConfig, tokenizer: Tokenizer) -> EncoderConfig:
    """The encoder that the run file names, whatever head is on it."""
    known = {"vocab_size": tokenizer.vocab_size}
    base = named_config(config.model, load_encoder_config, encoder_config_from_hf, known)
    check_fits(tokenizer, base.vocab_size, model_name(config))
    return base


def with_dropouts(config: RunConfig, model: EncoderConfig) -> EncoderConfig:
    """The model with the run file's dropout rates in place of its own."""
    return dataclasses.replace(model, dropouts=dropouts_of(model.dropouts, config.model.dropout))


def check_positions(config: RunConfig, model: EncoderConfig) -> None:
    """Refuse texts longer than the model's positions."""
    if config.data.seq_len > model.max_positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} exceeds the model's {model.max_positions} positions; lower it"
        )


def texts_batch(
    texts: Sequence[Sequence[int]],
    targets: Sequence[int],
    dropout: DropoutState | None = None,
    places: Sequence[int] = (),
) -> Batch:
    """Texts of unequal length with a target each."""
    rows = Rows.of([len(text) for text in texts], samples=places)
    tokens = np.concatenate([np.asarray(text, np.int64) for text in texts])
    return Batch(tokens, rows, np.asarray(targets, np.int64), dropout)


def encode(tokenizer: Tokenizer, texts: LabelledTexts, most: int) -> list[list[int]]:
    """Token ids of the texts, cut to `most`."""
    return [tokenizer.shortened(ids, most) for ids in tokenizer.encode_all(texts.texts)]


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer of the model to start from, or the one that the run file names."""
    if config.model.from_ is not None:
        return load_tokenizer(config.model.from_)
    if config.data.tokenizer is None:
        raise ConfigError(
            "pairs and labelled texts need a tokenizer: start from a model's directory (model.from), or set "
            'data.tokenizer = "DIR" or "bytes"'
        )
    return tokenizer_from(config.data.tokenizer)


TASKS: dict[str, type[EncoderTask]] = {"classification": ClassificationTask, "masked": MaskedTask}
