r"""Cross entropy over a vocabulary that is cut over the ranks; the logits are never gathered (Megatron-LM, section 3).

m      = max over ranks and columns of logits                         one small reduction [t]
Z      = sum over ranks of sum_j exp(logit_j - m)                     \ one small reduction [2, t]
z_y    = logit of the target, 0 on the ranks that don't hold it       /
loss_i = log Z_i + m_i - z_y,i
dlogit = (exp(logit - m) / Z - onehot(y)) * weight                    no communication
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import PARTIAL, VARYING, ArrayType
from mpitp.layers.layer import Layer, Send
from mpitp.layers.mappings import MaxFromTP, ReduceFromTP
from mpitp.layers.partition import Share
from mpitp.layers.placement import Cut
from mpitp.ops.cross_entropy import cross_entropy_backward, exp_sums, row_max, target_logits


@dataclass(slots=True)
class CrossEntropyContext:
    """The numerators of the softmax, their sum over the whole vocabulary, and the targets."""

    e: Array  # [t, v/tp]
    denominators: Array  # [t]
    targets: Array  # [t]
    dtype: Any  # of the logits


class VocabParallelCrossEntropy(Layer):
    """-log softmax(logits)[target] of every row, for logits [t, v/tp] of this rank's vocabulary rows."""

    _sums = "Z_r = sum_j exp(logits_rj - m), z_r = target's logit or 0"
    _backward = "dlogits_r = (exp(logits_r - m) / Z - onehot) dloss"
    algebra = Algebra(
        "vocabulary-parallel cross entropy",
        (
            Segment("m_partial = max_j logits_rj", "logits", "m_partial", "of this rank's columns only"),
            Sum("m", "m = max_r m_partial"),
            Segment(_sums, "logits m", "Zz_partial", "two rows: Z and z"),
            Sum("Zz", "Z = sum_r Z_r, z = sum_r z_r"),
            Segment("loss = log Z + m - z", "m Zz", "loss", "logits are never gathered"),
        ),
        (Segment(_backward, "dloss", "dlogits", "m, Z and the targets are everywhere"),),
        "two small all-reduces forward, nothing backward",
        exit="reduce",
        names={"x": "logits", "y": "loss", "dy": "dloss", "dx": "dlogits"},
    )

    def __init__(self, vocab: Share, maximum: MaxFromTP, reduce: ReduceFromTP, summands: int = 0) -> None:
        self.vocab, self.maximum, self.reduce, self.summands = vocab, maximum, reduce, summands

    def forward(self, x: Array, targets: Array) -> tuple[Array, CrossEntropyContext]:
        """logits x [t, v/tp], targets [t] -> losses [t]."""
        maxima = self.maximum.forward(row_max(x))  # [t]
        e, sums = exp_sums(x, maxima, self.vocab.local_blocks)
        denominators, target = self._sum(sums, target_logits(x, targets, self.vocab.span.start))
        xp = array_module(x)
        return xp.log(denominators) + maxima - target, CrossEntropyContext(e, denominators, targets, x.dtype)

    def backward(self, dy: Array, ctx: CrossEntropyContext) -> Array:
        """dlosses dy [t] (the weight of each row's loss) -> dlogits [t, v/tp]."""
        dlosses = self.reduce.backward(dy)
        dlogits = cross_entropy_backward(ctx.e, ctx.targets, self.vocab.span.start, ctx.denominators, dlosses)
        return dlogits.astype(ctx.dtype, copy=False)

    def _sum(self, sums: Array, target: Array) -> tuple[Array, Array]:
        """Denominators and target logits, summed over blocks and ranks; the target rides with the first block."""
        xp = array_module(sums)
        partials = [xp.stack((block, target if i == 0 else xp.zeros_like(target))) for i, block in enumerate(sums)]
        total = self.reduce.forward(partials, like=xp.stack((target, target)))
        return total[0], total[1]

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's columns of the logits to losses that are whole."""
        axis = self.reduce.axis
        incoming.expect(axis, VARYING, "logits", "each rank needs its own rows of the vocabulary")
        incoming.expect_columns((("vocab", Cut.of(self.vocab, axis)),), "logits")
        losses = self.reduce.placements(incoming.changed(axis, PARTIAL))
        losses.expect_summed("denominators and target logits")
        return losses

    def sends(self) -> tuple[Send, ...]:
        (total,) = self.reduce.sends(2, self.summands)
        return (*self.maximum.sends(1), replace(total, formula="2 t s", is_wide=True))
