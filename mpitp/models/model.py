"""A decoder-only language model over one tensor-parallel group: embedding, blocks, final norm, head and loss.

    x0     = dropout(E[tokens] (+ P[positions]))         vocab-parallel lookup, one all-reduce         [t, h]
    x_i    = block_i(x_{i-1})                            two all-reduces forward, two backward         [t, h]
    logits = norm(x_L) W^T                               column-parallel over the vocabulary           [t, v/tp]
    loss   = sum over counted targets of -log softmax(logits)[target]      two small reductions

W is E itself when the head is tied; both uses then add to one gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitp.backend.arrays import from_host, to_host
from mpitp.backend.device import Device
from mpitp.errors import ConfigError
from mpitp.layers.block import BlockContext, TransformerBlock
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import EmbeddingContext, PositionEmbedding, VocabParallelEmbedding
from mpitp.layers.kv_cache import LayerCache
from mpitp.layers.layout import Layout
from mpitp.layers.linear import ColumnParallelLinear, LinearContext
from mpitp.layers.loss import CrossEntropyContext, VocabParallelCrossEntropy
from mpitp.layers.norm import LayerNorm, NormContext, RMSNorm
from mpitp.layers.param import Param, prefixed
from mpitp.layers.sequences import Sequences
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.names import HfPiece
from mpitp.ops.rope import rope_inv_freq, rope_table

Array = Any


@dataclass(slots=True)
class ModelContext:
    """The contexts of all layers of one forward pass."""

    seqs: Sequences
    embedding: EmbeddingContext
    positions: EmbeddingContext | None
    blocks: list[BlockContext]
    final_norm: NormContext
    head: LinearContext


@dataclass(slots=True)
class LossContext:
    """The contexts of a forward pass that ended in a loss."""

    model: ModelContext
    loss: CrossEntropyContext


class CausalLM:
    """A decoder-only transformer, its every layer split over the ranks of `layout.group`.

    Make one with `new_model` (fresh weights) or `mpitp.checkpoint.load_model` (Hugging Face directory).
    """

    def __init__(self, config: DecoderConfig, layout: Layout, device: Device, dtype: Any, parts: ModelParts) -> None:
        self.config, self.layout, self.device, self.dtype = config, layout, device, np.dtype(dtype)
        self.embedding, self.positions, self.blocks = parts.embedding, parts.positions, parts.blocks
        self.final_norm, self.head, self.loss = parts.final_norm, parts.head, parts.loss
        self.pieces, self.ignorable_tensors = parts.pieces, parts.ignorable_tensors
        self.embedding_dropout = Dropout(config.dropouts.embedding, "embedding")
        theta = config.rope_theta
        self._inv_freq = rope_inv_freq(config.head_dim, theta, config.rope_scaling) if theta else None

    def forward(self, batch: Batch, caches: Sequence[LayerCache] | None = None) -> tuple[Array, ModelContext]:
        """Logits of this rank's vocabulary rows, [t, v/tp]. Raises ConfigError for a batch that doesn't fit."""
        hidden, ctx = self._forward_hidden(batch, caches)
        logits, ctx.head = self.head.forward(hidden)
        return logits, ctx

    def backward(self, dlogits: Array, ctx: ModelContext) -> None:
        """dlogits [t, v/tp]: add to the gradients of all parameters."""
        dx = self.head.backward(dlogits, ctx.head)
        dx = self.final_norm.backward(dx, ctx.final_norm)
        for block, block_ctx in zip(reversed(self.blocks), reversed(ctx.blocks), strict=True):
            dx = block.backward(dx, block_ctx)
        dx = self.embedding_dropout.backward(dx, ctx.seqs)
        if self.positions is not None and ctx.positions is not None:
            self.positions.backward(dx, ctx.positions)
        self.embedding.backward(dx, ctx.embedding)

    def loss_forward(self, batch: Batch) -> tuple[float, LossContext]:
        """The summed cross entropy of the batch's counted targets (divide by `batch.num_targets` for the mean)."""
        if batch.targets is None:
            raise ConfigError("a loss needs targets; make the batch with Batch.of_rows(tokens, targets)")
        self._check_ids(batch.targets, lowest=None)
        logits, model_ctx = self.forward(batch)
        losses, loss_ctx = self.loss.forward(logits, from_host(batch.targets, self.device.xp))
        counted = to_host(losses)[batch.targets >= 0]
        return float(counted.sum(dtype=np.float64)), LossContext(model_ctx, loss_ctx)

    def loss_backward(self, ctx: LossContext, scale: float) -> None:
        """Add `scale` times the gradient of the summed loss to the gradients of all parameters."""
        dlosses = (ctx.loss.targets >= 0).astype(self.dtype) * self.dtype.type(scale)  # [t]
        self.backward(self.loss.backward(dlosses, ctx.loss), ctx.model)

    def next_logits(self, batch: Batch, caches: Sequence[LayerCache]) -> np.ndarray:
        """Logits [b, v] after every sequence's last token, gathered in host memory of every rank (generation)."""
        hidden, _ = self._forward_hidden(batch, caches)
        last = hidden[from_host(batch.seqs.last_rows(), self.device.xp)]
        logits, _ = self.head.forward(last)
        return to_host(self.gather_logits(logits))

    def gather_logits(self, logits: Array) -> Array:
        """[t, v/tp] of every rank -> [t, v] on every rank."""
        return self.layout.group.all_gather(logits, dim=1)

    def new_caches(self, capacities: Sequence[int]) -> list[LayerCache]:
        """Empty KV caches, one a block, for sequences of at most these lengths."""
        kv_heads = len(self.layout.heads(self.config.heads, self.config.kv_heads).kv)
        sizes = tuple(capacities)
        head_dim, xp = self.config.head_dim, self.device.xp
        return [LayerCache(sizes, kv_heads, head_dim, self.dtype, xp) for _ in self.blocks]

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """Every parameter once, in forward order."""
        for name, layer in self.layers():
            if name == "head" and self.config.tied:
                continue
            yield from prefixed(name, layer.params()).items()

    def layers(self) -> Iterator[tuple[str, Any]]:
        """The model's layers by name, in forward order."""
        yield "embedding", self.embedding
        if self.positions is not None:
            yield "positions", self.positions
        for i, block in enumerate(self.blocks):
            yield f"blocks.{i}", block
        yield "final_norm", self.final_norm
        yield "head", self.head

    def hf_pieces(self) -> dict[tuple[str, str], HfPiece]:
        """Where each (parameter, part) lies in a Hugging Face directory."""
        return self.pieces

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for _, param in self.named_params():
            param.grad = None

    def _forward_hidden(self, batch: Batch, caches: Sequence[LayerCache] | None) -> tuple[Array, ModelContext]:
        self._check_ids(batch.tokens, lowest=0)
        positions = self._checked_positions(batch.seqs)
        xp = self.device.xp
        seqs = self._with_rotation(batch.seqs, positions)
        x, embedding_ctx = self.embedding.forward(from_host(batch.tokens, xp))
        positions_ctx = None
        if self.positions is not None:
            placed, positions_ctx = self.positions.forward(from_host(positions, xp))
            x += placed
        x = self.embedding_dropout.forward(x, seqs)
        block_ctxs = []
        for i, block in enumerate(self.blocks):
            x, ctx = block.forward(x, seqs, caches[i] if caches is not None else None)
            block_ctxs.append(ctx)
        hidden, norm_ctx = self.final_norm.forward(x)
        return hidden, ModelContext(seqs, embedding_ctx, positions_ctx, block_ctxs, norm_ctx, LinearContext(hidden))

    def _with_rotation(self, seqs: Sequences, positions: np.ndarray) -> Sequences:
        if self._inv_freq is None:
            return seqs
        xp = self.device.xp
        return replace(seqs, rotation=rope_table(from_host(positions, xp), self._inv_freq, self.dtype, xp))

    def _checked_positions(self, seqs: Sequences) -> np.ndarray:
        positions = seqs.positions()
        if len(positions) and positions.max() >= self.config.max_positions:
            raise ConfigError(
                f"a sequence of {positions.max() + 1} tokens exceeds the model's {self.config.max_positions} "
                "positions; use a shorter one"
            )
        if not len(positions) or min(seqs.lengths) < 1:
            raise ConfigError("a sequence without tokens; every sequence needs at least one")
        return positions

    def _check_ids(self, ids: np.ndarray, lowest: int | None) -> None:
        bad = ids[(ids >= self.config.vocab_size) | (ids < lowest if lowest is not None else False)]
        if len(bad):
            raise ConfigError(
                f"token id {bad[0]} lies outside the model's vocabulary of {self.config.vocab_size}; "
                "was the text prepared with this model's tokenizer?"
            )


@dataclass(slots=True)
class ModelParts:
    """The layers of a model and its name table, put together by `models/registry.py`."""

    embedding: VocabParallelEmbedding
    positions: PositionEmbedding | None
    blocks: list[TransformerBlock]
    final_norm: LayerNorm | RMSNorm
    head: ColumnParallelLinear
    loss: VocabParallelCrossEntropy
    pieces: dict[tuple[str, str], HfPiece]
    ignorable_tensors: tuple[str, ...]
