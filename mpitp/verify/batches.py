"""The batches of a verification: random ones of any kind of model, and the ids at the edges of every rank's shard."""

from __future__ import annotations

import dataclasses

import numpy as np

from mpitp.errors import UsageError
from mpitp.layers.partition import share_of
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows, Run
from mpitp.models.any_config import AnyConfig
from mpitp.models.batch import IGNORED, Batch
from mpitp.models.encoder_config import CLASSIFICATION, MASKED, EncoderConfig
from mpitp.models.vision_config import VisionConfig

DEFAULT_TOKENS = 16


def random_batch(config: AnyConfig, batch: int, seq: int | None, seed: int) -> Batch:
    """`batch` sequences of `seq` random tokens (None: 16, or all positions), with the model's own dropout rates in
    force. Encoders have texts of unequal lengths up to that; vision has as many random images, whose size is the
    model's.
    """
    if batch < 1 or (seq is not None and seq < 1):
        raise UsageError(f"--batch and --seq must be at least 1, got {batch} and {seq}")
    random = np.random.default_rng(seed)
    if isinstance(config, VisionConfig):
        if seq is not None:
            raise UsageError(f"--seq {seq}: an image has as many tokens as the model's patches; leave it out")
        return _random_images(config, batch, random)
    seq = min(DEFAULT_TOKENS, config.max_positions) if seq is None else seq
    if seq > config.max_positions:
        raise UsageError(f"--seq {seq} exceeds the model's {config.max_positions} positions; use a smaller one")
    state = DropoutState(seed, 1) if any(dataclasses.astuple(config.dropouts)) else None
    if isinstance(config, EncoderConfig):
        return _random_texts(config, [seq - i % max(seq // 2, 1) for i in range(batch)], random, state)
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


def with_edges(batch: Batch, config: AnyConfig, blocks: int, ranks: int, first_sample: int = 0) -> Batch:
    """The batch, and behind it sequences of the first and last id of every rank's and every block's rows of the
    vocabulary, each as input and as target: a fault at the edge of a shard shows only there. `ranks`: along tp;
    `blocks`: of invariant mode, 0 for none. `first_sample`: the lowest number that no sample of the step has; 0: that
    of the batch's runs. Images have no vocabulary.
    """
    if isinstance(config, VisionConfig):
        return batch
    shares = [share_of(config.vocab_size, rank, ranks, blocks) for rank in range(ranks)]
    edges = sorted({edge for share in shares for rows in share.blocks if rows for edge in (rows[0], rows[-1])})
    assert batch.targets is not None
    runs, tokens, targets = list(batch.rows.runs), [batch.tokens], [batch.targets]
    for first in range(0, len(edges), config.max_positions):
        ids = np.array(edges[first : first + config.max_positions], np.int64)
        runs.append(Run((first_sample or len(batch.rows.runs)) + first // config.max_positions, 0, len(ids), len(runs)))
        tokens, targets = [*tokens, ids], [*targets, _targets_of(config, ids)]
    all_tokens = np.concatenate(tokens)
    types = None if batch.types is None else np.pad(batch.types, (0, len(all_tokens) - len(batch.types)))
    return dataclasses.replace(
        batch, tokens=all_tokens, targets=np.concatenate(targets), rows=Rows(tuple(runs)), types=types
    )


def _targets_of(config: AnyConfig, ids: np.ndarray) -> np.ndarray:
    """Of a sequence of edges: their own neighbours, where targets are ids; else classes."""
    if not isinstance(config, EncoderConfig) or config.head == MASKED:
        return np.roll(ids, -1)
    return ids[: 1 if config.head == CLASSIFICATION else None] % config.num_classes
