"""A model with an encoder and a decoder (Vaswani et al. 2017): what a source says is told again in other words.

    encoder.embedding, encoder.blocks.0, ...   the source: every token sees every other one of its text   [t_source, h]
    to decoder                                 its output is the memory; on go the ids of the target            ids [t]
    embedding, blocks.0, ...                   the target: a token sees those before it, and all of the memory   [t, h]
    head                                       logits = x E^T, with the embedding's own table or another      [t, v/tp]
    loss                                       sum over counted targets of -log softmax(logits)[target]

T5 has norms before the branches and one behind the blocks, BART and Marian behind each branch; positions are relative,
learned or sines. Texts of different lengths lie one after the other without padding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, from_host, to_host
from mpitp.backend.precision import widened
from mpitp.errors import ConfigError
from mpitp.layers.build import Builder
from mpitp.layers.cached_attention import Caches, KeyCaches
from mpitp.layers.layer import Layer
from mpitp.layers.passes import Crossing, Pass
from mpitp.layers.rows import Rows
from mpitp.layers.site import Site
from mpitp.models.batch import Batch, check_ids, check_lengths
from mpitp.models.beside import Memory
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.layered import HfNames, LayeredModel
from mpitp.models.stages import TO_DECODER, Chunk

HEAD = "head"


class EncoderDecoder(LayeredModel):
    """An encoder with a decoder on a site. Make one with `new_encoder_decoder`, or
    `mpitp.checkpoint.encoder_decoder.load_encoder_decoder`.
    """

    config: EncoderDecoderConfig
    entrance = "encoder.embedding"

    def __init__(
        self,
        config: EncoderDecoderConfig,
        site: Site,
        layers: dict[str, Layer],
        names: HfNames,
        chunks: Sequence[Chunk],
    ) -> None:
        super().__init__(site, layers, Builder(site, 0.0).loss(site.share(config.vocab_size)), names, chunks)
        self.config, self.beside = config, Memory(self)

    def inputs(self, batch: Batch) -> Array:
        source = source_of(batch)
        self._check(source.tokens, source.rows, "source")
        self._check(batch.tokens, batch.rows, "target")
        return from_host(source.tokens, self.device.xp)

    def new_pass(self, batch: Batch, caches: Caches | None = None) -> Pass:
        source = source_of(batch)
        ids = from_host(batch.tokens, self.device.xp)
        crossing = Crossing(Pass(source.rows, batch.dropout, shard=self.shard_of(source.rows)), ids)
        return Pass(batch.rows, batch.dropout, caches, self.shard_of(batch.rows), crossing=crossing)

    def check_targets(self, targets: np.ndarray) -> None:
        check_ids(np.maximum(targets, 0), self.config.vocab_size)

    def encode(self, sources: Sequence[Sequence[int]]) -> Crossing:
        """The memory of these sources (token ids), the same on every rank: samples 0, 1, ... of what is generated."""
        if self.site.sequence_parallel or self.site.mesh.sizes["pp"] * self.site.mesh.sizes["cp"] > 1:
            raise ConfigError(
                "a model in stages, with sequence parallelism or over mesh.cp trains; to generate, make it without"
            )
        source = Batch.of_lists(sources)
        self._check(source.tokens, source.rows, "source")
        ids = from_host(np.zeros(0, np.int64), self.device.xp)
        crossing = Crossing(Pass(source.rows), ids, kept={})
        run = Pass(Rows(()), crossing=crossing)
        x: Any = from_host(source.tokens, self.device.xp)
        for name in self._names(before=True):
            x, _ = self.layers[name].forward(x, run)
        return crossing

    def next_logits(self, tokens: Sequence[int], rows: Rows, crossing: Crossing, caches: Caches) -> np.ndarray:
        """Logits [b, v] behind one new token of each run, gathered in host memory of every rank (generation).

        A run's sample is its source's number in `crossing`.
        """
        self._check(np.asarray(tokens, np.int64), rows, "target")
        x: Any = from_host(np.asarray(tokens, np.int64), self.device.xp)
        run = Pass(rows, None, caches, crossing=crossing)
        for name in self._names(before=False):
            x, _ = self.layers[name].forward(x, run)
        return widened(to_host(self.gather_logits(x)))

    def new_caches(self, capacities: Sequence[int]) -> KeyCaches:
        """Empty caches of the decoder's own keys and values, for texts of at most these lengths."""
        return KeyCaches(capacities)

    def _names(self, *, before: bool) -> list[str]:
        """Of the layers up to the memory, or behind it."""
        names = list(self.layers)
        place = names.index(TO_DECODER) + 1
        return names[:place] if before else names[place:]

    def _check(self, tokens: np.ndarray, rows: Rows, what: str) -> None:
        check_ids(tokens, self.config.vocab_size)
        check_lengths(rows, self.config.max_positions or sys.maxsize, what, "cut it")


def source_of(batch: Batch) -> Batch:
    """What the encoder reads. Raises ConfigError for a batch without, or whose samples aren't those of the targets."""
    if batch.source is None:
        raise ConfigError("a model with an encoder and a decoder takes pairs: give the batch a source")
    samples = [[run.sample for run in each.rows.runs] for each in (batch, batch.source)]
    if samples[0] != samples[1]:
        raise ConfigError(
            f"targets of samples {samples[0][:8]} with sources of {samples[1][:8]}: they must be the same"
        )
    return batch.source
