"""The task of a model with an encoder and a decoder: the target of each source, by teacher forcing.

    encoder       the source
    decoder       start, t_0, ..., t_(n-2)      learns      t_0, ..., t_(n-1) = end

Held-out pairs tell the mean loss, the part of right tokens, and the part of targets whose every token is right: those
that greedy generation gives word for word, since it is fed the right tokens then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, to_host
from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource, load_encoder_decoder_config
from mpitp.comm.group import Group
from mpitp.config import DropoutSection, RunConfig
from mpitp.data.pairs import Pairs, read_pairs
from mpitp.data.sampler import windows_of
from mpitp.data.tokenizer import Tokenizer, check_fits, check_rows
from mpitp.errors import ConfigError
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows
from mpitp.models.batch import Batch
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig, PairDropouts
from mpitp.models.encoder_decoders import encoder_decoder_config_from_hf
from mpitp.models.layered import LayeredModel
from mpitp.models.runner import Measure
from mpitp.train.deal import Deal
from mpitp.train.encoder_task import tokenizer_of
from mpitp.train.named_model import named_config
from mpitp.train.setup import model_name, num_microbatches, run_cutting
from mpitp.train.step import TrainStep
from mpitp.train.task import Judgement, Task

Encoded = list[tuple[list[int], list[int]]]  # ids of source and target


class PairTask(Task):
    """Sources with their targets."""

    model_config: EncoderDecoderConfig

    def __init__(self, config: RunConfig) -> None:
        self.config, data = config, config.data
        self.pairs = read_pairs(data.train)
        self.valid = None if data.valid is None else read_pairs(data.valid)
        self.tokenizer = tokenizer_of(config)
        base = base_config(config, self.tokenizer)
        self.model_config = dataclasses.replace(base, dropouts=pair_dropouts(base.dropouts, config.model.dropout))
        if base.max_positions and data.seq_len > base.max_positions:
            raise ConfigError(
                f"data.seq_len={data.seq_len} exceeds the model's {base.max_positions} positions; lower it"
            )
        self.has_valid, self.files, self.sha256 = self.valid is not None, self.tokenizer.files, self.pairs.sha256
        for pairs in (self.encoded, self.valid_encoded):
            check_rows(self.tokenizer, [ids for pair in pairs for ids in pair], base.vocab_size, model_name(config))

    @cached_property
    def encoded(self) -> Encoded:
        """The pairs to learn from."""
        return encode(self.tokenizer, self.pairs, self.config.data.seq_len, self.model_config)

    @cached_property
    def valid_encoded(self) -> Encoded:
        """The held-out pairs."""
        if self.valid is None:
            return []
        return encode(self.tokenizer, self.valid, self.config.data.seq_len, self.model_config)

    @property
    def source(self) -> EncoderDecoderSource:
        section, train = self.config.model, self.config.train
        directory = None if section.from_ is None else Path(section.from_)
        return EncoderDecoderSource(
            self.model_config,
            directory,
            train.seed,
            train.recompute,
            deals_weights=self.config.optim.zero == 3,
            cutting=run_cutting(self.config),
        )

    def notices(self) -> Sequence[str]:
        most = self.config.data.seq_len
        cut = sum(max(map(len, pair)) >= most for pair in self.encoded)
        notes = [
            f"{cut} of {len(self.encoded)} pairs have data.seq_len={most} tokens or more; what is behind is cut off"
        ]
        return [*self.model_config.notices, *(notes if cut else [])]

    def check(self, world: Group) -> None:
        """The file has been read whole."""

    def step_batches(self, step: int, deal: Deal) -> list[Batch]:
        size, micro, seed = self.config.global_batch_size, self.config.train.micro_batch_size, self.config.train.seed
        state = DropoutState(seed, step) if any(dataclasses.astuple(self.model_config.dropouts)) else None
        batches = []
        for number in deal.of(num_microbatches(self.config)):
            places = range(number * micro, min((number + 1) * micro, size))
            chosen = windows_of([(step - 1) * size + place for place in places], len(self.encoded), seed)
            batch = pairs_batch([self.encoded[i] for i in chosen], self.model_config.start_id, state, places)
            batches.append(batch.cut(*deal.piece))
        return batches

    def held_out_batches(self, deal: Deal) -> Iterator[Batch]:
        micro, pairs = self.config.train.micro_batch_size, self.valid_encoded
        for number in deal.of(-(-len(pairs) // micro)):
            batch = pairs_batch(pairs[number * micro : (number + 1) * micro], self.model_config.start_id)
            yield batch.cut(*deal.piece)

    def judge(self, step: TrainStep, batches: Iterable[Batch]) -> Judgement:
        return judge(step, batches)

    def generation_config(self) -> dict[str, Any]:
        model = self.model_config
        ids = {"decoder_start_token_id": model.start_id, "pad_token_id": model.hf.get("pad_token_id")}
        return {key: value for key, value in ids.items() if value is not None}


def judge(step: TrainStep, batches: Iterable[Batch]) -> Judgement:
    """Mean loss, part of right tokens and part of wholly right targets over all ranks' batches. A collective over the
    ranks of the model.
    """
    tokens, (loss, right, whole, texts) = step.measure(batches, Measure(3, right_ones))
    return Judgement(loss / tokens, right / tokens, whole / texts)


def right_ones(model: LayeredModel, logits: Array, batch: Batch) -> tuple[float, float, float]:
    """How many tokens are right, how many targets are from beginning to end, and of how many."""
    is_right, group = to_host(model.gather_logits(logits)).argmax(axis=1) == batch.targets, model.site.mesh["cp"]
    samples = [run.sample for run in batch.rows.runs]
    numbers = {sample: number for number, sample in enumerate(dict.fromkeys(samples))}
    wrong = np.zeros(len(numbers))  # tokens of each target, on all ranks that have a piece of it
    for each, rows in batch.rows.places():
        wrong[numbers[each.sample]] += np.count_nonzero(~is_right[rows])
    whole = group.all_reduce(wrong) == 0
    counts = group.rank == 0
    return float(is_right.sum()), float(whole.sum() * counts), float(len(numbers) * counts)


def pairs_batch(pairs: Encoded, start: int, dropout: DropoutState | None = None, places: Sequence[int] = ()) -> Batch:
    """Pairs of unequal lengths as a batch; `start`: what the decoder is given before the target."""
    sources, targets = zip(*pairs, strict=True)
    given = [[start, *target[:-1]] for target in targets]
    source = Batch(_joined(sources), Rows.of([len(ids) for ids in sources], samples=places))
    rows = Rows.of([len(ids) for ids in given], samples=places)
    return Batch(_joined(given), rows, _joined(targets), dropout, source=source)


def encode(tokenizer: Tokenizer, pairs: Pairs, most: int, model: EncoderDecoderConfig) -> Encoded:
    """Token ids of the pairs, each text cut to `most`. A target ends with an end of text; a source does where the
    tokenizer puts one there.
    """
    sources = [tokenizer.shortened(ids, most) for ids in tokenizer.encode_all(pairs.sources)]
    targets = [_ended(tokenizer.shortened(ids, most), most, model) for ids in tokenizer.encode_all(pairs.targets)]
    return list(zip(sources, targets, strict=True))


def base_config(config: RunConfig, tokenizer: Tokenizer) -> EncoderDecoderConfig:
    """The model that the run file names."""
    known = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_id}
    base = named_config(config.model, load_encoder_decoder_config, encoder_decoder_config_from_hf, known)
    check_fits(tokenizer, base.vocab_size, model_name(config))
    if not base.eos_ids:
        raise ConfigError("the model has no end of text (eos_token_id), so that a target would never end; name one")
    return base


def _ended(ids: list[int], most: int, model: EncoderDecoderConfig) -> list[int]:
    return ids if ids and ids[-1] in model.eos_ids else [*ids[: most - 1], model.eos_ids[0]]


def _joined(texts: Iterable[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(ids, np.int64) for ids in texts])


def pair_dropouts(model: PairDropouts, section: DropoutSection) -> PairDropouts:
    """The model's rates, replaced where the run file names one; that of the MLPs' inner columns goes with `resid`."""
    given = {"embedding": section.embd, "attention": section.attn, "residual": section.resid, "inner": section.resid}
    return dataclasses.replace(model, **{name: rate for name, rate in given.items() if rate is not None})
