r"""The auxiliary losses of a mixture of experts: what all routers of a pass have counted, and what it weighs.

    loss = cross entropy + coef * balance + z_coef * z             of each microbatch, by its targets' share of the step

Balance and z are means over all tokens of the whole microbatch and over all blocks (`ops/balance.py`), and no sums of
means of a rank: a router adds up what the ranks have counted that hold other tokens of the same microbatch (along cp,
and along tp with sequence parallelism; `Site.token_axes`), the blocks of a pass add theirs, and the stages of a
pipeline hand the sum on. So the losses, and a router's gradients, are the same in every layout. Ranks along dp and ep
have other microbatches: their losses are added like those of the cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpitp.ops.balance import balance_gradient, balance_loss, z_gradient, z_loss


@dataclass(frozen=True, slots=True)
class BalanceRule:
    """What the auxiliary losses weigh (0: not counted), and the number of experts."""

    num_experts: int
    coef: float = 0.0
    z_coef: float = 0.0

    @property
    def empty(self) -> np.ndarray:
        """The tally of no rows."""
        return np.zeros(2 * self.num_experts + 2)


@dataclass(slots=True, eq=False)
class Balance:
    """The losses of one pass. `tallies`: of each router by its name; one that runs again (recompute) counts once.

    `before`: the tally of a pipeline's stages before. `total`, of all routers of the model, and `weight`, what the
    gradients of the losses are multiplied by, are there when backward begins.
    """

    rule: BalanceRule
    tallies: dict[str, np.ndarray] = field(default_factory=dict)
    before: np.ndarray | None = None
    total: np.ndarray | None = None
    weight: float = 0.0

    def go_on_from(self, before: np.ndarray | None) -> None:
        """Begin a part of the model: so much has been counted in those before it."""
        self.before, self.tallies = before, {}

    def so_far(self) -> np.ndarray:
        """The tally of all parts up to here."""
        start = self.rule.empty if self.before is None else self.before
        return sum(self.tallies.values(), start=start.copy())

    def weighed(self) -> np.ndarray:
        """The total and its weight, for a stage before."""
        assert self.total is not None, "backward before all routers have counted"
        return np.append(self.total, self.weight)

    def take_weighed(self, numbers: np.ndarray | None) -> None:
        """What a later stage has found."""
        assert numbers is not None, "a gradient without the auxiliary losses' numbers"
        self.total, self.weight = numbers[:-1], float(numbers[-1])

    def finish(self) -> float:
        """All routers have counted: the weighed losses."""
        self.total = self.so_far()
        return self.rule.coef * balance_loss(self.total) + self.rule.z_coef * z_loss(self.total)

    def probs_gradient(self) -> np.ndarray:
        """Of every row's probabilities, [e]."""
        assert self.total is not None, "backward before all routers have counted"
        return self.weight * self.rule.coef * balance_gradient(self.total)

    def logits_gradient(self) -> float:
        """What log_sums times probs is to be multiplied by to be that of the logits."""
        assert self.total is not None, "backward before all routers have counted"
        return self.weight * self.rule.z_coef * z_gradient(self.total)
