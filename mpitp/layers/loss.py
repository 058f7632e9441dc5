r"""Cross entropy over a vocabulary that is cut over the ranks; the logits are never gathered (Megatron-LM, section 3).

m      = max over ranks and columns of logits                         one small reduction [t]
Z      = sum over ranks of sum_j exp(logit_j - m)                     \ one small reduction [2, t]
z_y    = logit of the target, 0 on the ranks that don't hold it       /
loss_i = log Z_i + m_i - z_y,i
dlogit = (exp(logit - m) / Z - onehot(y)) * weight                    no communication
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.comm.group import Group
from mpitp.layers.layout import Summation
from mpitp.layers.partition import Share
from mpitp.ops.cross_entropy import cross_entropy_backward, exp_sums, row_max, target_logits

Array = Any


@dataclass(slots=True)
class CrossEntropyContext:
    """The numerators of the softmax, their sum over the whole vocabulary, and the targets."""

    e: Array  # [t, v/tp]
    denominators: Array  # [t]
    targets: Array  # [t]


class VocabParallelCrossEntropy:
    """-log softmax(logits)[target] of every row, for logits [t, v/tp] of this rank's vocabulary rows."""

    def __init__(self, vocab: Share, group: Group, summation: Summation) -> None:
        self.vocab, self.group, self.summation = vocab, group, summation

    def forward(self, logits: Array, targets: Array) -> tuple[Array, CrossEntropyContext]:
        """logits [t, v/tp], targets [t] -> losses [t]."""
        local_max = row_max(logits)
        maxima = self.group.all_reduce(local_max, op="max", out=local_max)  # [t]
        e, sums = exp_sums(logits, maxima, self.vocab.local_blocks)
        shifted_targets = target_logits(logits, targets, self.vocab.span.start)
        denominators, target = self._sum(sums, shifted_targets)
        xp = array_module(logits)
        return xp.log(denominators) + maxima - target, CrossEntropyContext(e, denominators, targets)

    def backward(self, dlosses: Array, ctx: CrossEntropyContext) -> Array:
        """dlosses [t] (the weight of each row's loss) -> dlogits [t, v/tp]."""
        return cross_entropy_backward(ctx.e, ctx.targets, self.vocab.span.start, ctx.denominators, dlosses)

    def _sum(self, sums: Array, target: Array) -> tuple[Array, Array]:
        """Denominators and target logits, summed over blocks and ranks; the target rides with the first block."""
        xp = array_module(sums)
        partials = [xp.stack((block, target if i == 0 else xp.zeros_like(target))) for i, block in enumerate(sums)]
        total = self.summation(partials, like=xp.stack((target, target)))
        return total[0], total[1]
