"""The batches of a verification: random ones of any kind of model, and the ids at the edges of every rank's shard."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np

from mpitp.errors import UsageError
from mpitp.layers.partition import share_of
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows, Run
from mpitp.models.any_config import AnyConfig
from mpitp.models.batch import IGNORED, Batch
from mpitp.models.encoder_config import CLASSIFICATION, MASKED, EncoderConfig
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.vision_config import VisionConfig

DEFAULT_TOKENS = 16


def random_batch(config: AnyConfig, batch: int, seq: int | None, seed: int) -> Batch:
    """`batch` sequences of `seq` random tokens (None: 16, or all positions), with the model's own dropout rates in
    force. Encoders have texts of unequal lengths up to that, and with a decoder targets of other ones; vision has as
    many random images, whose size is the model's.
    """
    if batch < 1 or (seq is not None and seq < 1):
        raise UsageError(f"--batch and --seq must be at least 1, got {batch} and {seq}")
    random = np.random.default_rng(seed)
    if isinstance(config, VisionConfig):
        if seq is not None:
            raise UsageError(f"--seq {seq}: an image has as many tokens as the model's patches; leave it out")
        return _random_images(config, batch, random)
    most = config.max_positions or sys.maxsize  # 0: no length is too long
    seq = min(DEFAULT_TOKENS, most) if seq is None else seq
    if seq > most:
        raise UsageError(f"--seq {seq} exceeds the model's {config.max_positions} positions; use a smaller one")
    state = DropoutState(seed, 1) if any(dataclasses.astuple(config.dropouts)) else None
    lengths = [seq - i % max(seq // 2, 1) for i in range(batch)]
    if isinstance(config, EncoderConfig):
        return _random_texts(config, lengths, random, state)
    if isinstance(config, EncoderDecoderConfig):
        return _random_pairs(config, lengths, random, state)
    tokens = random.integers(0, config.vocab_size, (batch, seq + 1))
    return Batch.of_rows(tokens[:, :-1], tokens[:, 1:], state)


def _random_images(config: VisionConfig, batch: int, random: np.random.Generator) -> Batch:
    patches, width = config.grid[0] * config.grid[1], config.channels * config.patch_size**2
    pixels = random.standard_normal((batch * patches, width))
    return Batch(pixels, Rows.of([1 + patches] * batch), random.integers(0, len(config.labels), batch))


def _random_texts(
    config: EncoderConfig, lengths: list[int], random: np.random.Generator, state: DropoutState | None
) -> Batch:
    tokens = random.integers(0, config.vocab_size, sum(lengths))
    types = random.integers(0, config.num_types, len(tokens)) if config.num_types > 1 else None
    if config.head == CLASSIFICATION:
        targets = random.integers(0, len(config.labels), len(lengths))
    else:
        targets = random.integers(0, config.num_classes, len(tokens))
    if config.head == MASKED:  # most tokens of a text aren't hidden
        targets[1::2] = IGNORED
    return Batch(tokens, Rows.of(lengths), targets, state, types)


def _random_pairs(
    config: EncoderDecoderConfig, lengths: list[int], random: np.random.Generator, state: DropoutState | None
) -> Batch:
    """Sources of these lengths, each with a target that is one token shorter."""
    source = Batch(random.integers(0, config.vocab_size, sum(lengths)), Rows.of(lengths))
    given = [np.append(config.start_id, random.integers(0, config.vocab_size, max(n - 2, 0))) for n in lengths]
    tokens, rows = np.concatenate(given), Rows.of([len(ids) for ids in given])
    return Batch(tokens, rows, random.integers(0, config.vocab_size, len(tokens)), state, source=source)


def with_edges(
    batch: Batch,
    config: AnyConfig,
    blocks: int,
    ranks: int,
    first_sample: int = 0,
    weights: Sequence[float] = (),
) -> Batch:
    """The batch, and behind it sequences of the first and last id of every rank's and every block's rows of the
    vocabulary, each as input and as target: a fault at the edge of a shard shows only there. `ranks`: along tp;
    `weights`: theirs; `blocks`: of invariant mode, 0 for none. `first_sample`: the lowest number that no sample of the
    step has; 0: that of the batch's runs. Images have no vocabulary.
    """
    if isinstance(config, VisionConfig):
        return batch
    shares = [share_of(config.vocab_size, rank, ranks, blocks, weights) for rank in range(ranks)]
    edges = sorted({edge for share in shares for rows in share.blocks if rows for edge in (rows[0], rows[-1])})
    most = config.max_positions or len(edges)
    texts = [np.array(edges[first : first + most], np.int64) for first in range(0, len(edges), most)]
    targets = [_targets_of(config, ids) for ids in texts]
    first_sample = first_sample or len(batch.rows.runs)
    source = None if batch.source is None else _longer(batch.source, texts, [], first_sample)
    return dataclasses.replace(_longer(batch, texts, targets, first_sample), source=source)


def _longer(batch: Batch, texts: list[np.ndarray], targets: list[np.ndarray], first_sample: int) -> Batch:
    """The batch and these texts behind it, with their targets where it has some."""
    runs = list(batch.rows.runs)
    for number, ids in enumerate(texts, start=first_sample):
        runs.append(Run(number, 0, len(ids), len(runs)))
    tokens = np.concatenate([batch.tokens, *texts])
    types = None if batch.types is None else np.pad(batch.types, (0, len(tokens) - len(batch.types)))
    made = None if batch.targets is None else np.concatenate([batch.targets, *targets])
    return dataclasses.replace(batch, tokens=tokens, targets=made, rows=Rows(tuple(runs)), types=types)


def _targets_of(config: AnyConfig, ids: np.ndarray) -> np.ndarray:
    """Of a sequence of edges: their own neighbours, where targets are ids; else classes."""
    if not isinstance(config, EncoderConfig) or config.head == MASKED:
        return np.roll(ids, -1)
    return ids[: 1 if config.head == CLASSIFICATION else None] % config.num_classes
