"""A decoder-only language model: named layers that run one after the other, and a loss.

    embedding            x = E[tokens]                          vocab-parallel lookup, one all-reduce         [t, h]
    positions            x = x + P[positions]                   (GPT-2)                                       [t, h]
    blocks.0, ...        x = block_i(x)                         two all-reduces forward, two backward         [t, h]
    final_norm, head     logits = norm(x) W^T                   column-parallel over the vocabulary           [t, v/tp]
                         (some types scale x behind the embedding or normalise it there, or cap the logits)
    loss                 sum over counted targets of -log softmax(logits)[target]      two small reductions

W is E itself when the head is tied; both uses then add to one gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, from_host, to_host
from mpitp.backend.precision import widened
from mpitp.errors import ConfigError
from mpitp.layers.cached_attention import Caches, KeyCaches
from mpitp.layers.decode_calls import DecodeCalls
from mpitp.layers.layer import Layer
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.site import Site
from mpitp.models.batch import Batch, check_ids, check_lengths
from mpitp.models.config import DecoderConfig
from mpitp.models.layered import HfNames, LayeredModel
from mpitp.models.stages import Chunk

EMBEDDING, HEAD = "embedding", "head"
_SEQUENCE = ("sequence", "use a shorter one")  # for messages


class CausalLM(LayeredModel):
    """A decoder-only transformer on a site; `layers` by name, in forward order.

    Make one with `new_model` (fresh weights) or `mpitp.checkpoint.load_model` (Hugging Face directory).
    """

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        site: Site,
        layers: dict[str, Layer],
        loss: VocabParallelCrossEntropy,
        names: HfNames,
        chunks: Sequence[Chunk] = (),
    ) -> None:
        super().__init__(site, layers, loss, names, chunks)
        self.config = config
        mixture = config.traits.mixture
        self.balance_rule = None if mixture is None else mixture.balance_rule

    def forward(self, batch: Batch, caches: Caches | None = None) -> tuple[Array, list[Any]]:
        """Logits of this rank's vocabulary rows, [t, v/tp]. Raises ConfigError for a batch that doesn't fit."""
        return self.run_layers(list(self.layers.values()), batch, self.new_pass(batch, caches))

    def inputs(self, batch: Batch) -> Array:
        check_ids(batch.tokens, self.config.vocab_size)
        if not batch.is_idle:
            check_lengths(batch.rows, self.config.max_positions, *_SEQUENCE)
        return from_host(batch.tokens, self.device.xp)

    def check_targets(self, targets: np.ndarray) -> None:
        check_ids(np.maximum(targets, 0), self.config.vocab_size)

    def next_logits(
        self, batch: Batch, caches: Caches, wanted: Sequence[int] | None = None, short: DecodeCalls | None = None
    ) -> np.ndarray:
        """Logits [b, v] after every run's last token, gathered in host memory of every rank (generation).

        wanted: after these rows of the batch instead. short: of `decode_calls`, for a batch that it takes.
        """
        if self.site.sequence_parallel:
            raise ConfigError("a sequence-parallel model trains; to generate, make it on a site without")
        check_lengths(batch.rows, self.config.cached_positions, *_SEQUENCE)
        trunk, ends = self._trunk_and_ends()
        run = self.new_pass(batch, caches)
        hidden = self.run_layers(trunk, batch, run)[0] if short is None else short.forward(self.inputs(batch), run)
        rows = batch.rows.last_rows() if wanted is None else np.array(wanted, np.int64)
        if not len(rows):
            return np.empty((0, self.config.vocab_size), np.float32)
        logits = hidden[from_host(rows, self.device.xp)]
        for layer in ends:
            logits, _ = layer.forward(logits)
        return widened(to_host(self.gather_logits(logits)))

    def decode_calls(self) -> DecodeCalls:
        """The layers before the head as steps of a few newest tokens go through them."""
        return DecodeCalls(self._trunk_and_ends()[0], self.device.xp, self.dtype)

    def _trunk_and_ends(self) -> tuple[list[Layer], list[Layer]]:
        """The layers before the head, and those from it on."""
        layers, head = list(self.layers.values()), list(self.layers).index(HEAD)
        return layers[:head], layers[head:]

    def new_caches(self, capacities: Sequence[int]) -> KeyCaches:
        """Empty KV caches for sequences of at most these lengths."""
        return KeyCaches(capacities)
