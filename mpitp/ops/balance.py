r"""The auxiliary losses of a router: an even load (Fedus et al. 2022, Switch, eq. 4 to 6; GShard) and small logits
(Zoph et al. 2022, ST-MoE, eq. 5).

Over the N rows that the routers of all blocks have seen of a microbatch (blocks times tokens), k experts chosen a row:

    f_i     = times that expert i was chosen / N             sum_i f_i = k
    P_i     = sum over rows of p_i / N                       sum_i P_i = 1
    balance = e sum_i f_i P_i                                k where all is even; as transformers computes it: one mean
                                                             over all blocks, not a sum of means
    z       = sum over rows of (log sum_i exp l_i)^2 / N

Their gradients, of a row's probabilities and logits (the choice, and so f, has none):

    dbalance / dp_i = e f_i / N,     dz / dl_i = 2 (log sum exp l) p_i / N

A tally is the sums alone, so that blocks, ranks and stages add theirs: [e choices, e sums of p, sum of squares, rows].
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.ops.routing import Choice


def tally_of(choice: Choice) -> np.ndarray:
    """The sums over the rows of one router, float64 [2 e + 2], in host memory."""
    e = choice.num_experts
    tally = np.empty(2 * e + 2)
    tally[:e] = np.bincount(choice.chosen.reshape(-1), minlength=e)
    tally[e : 2 * e] = to_host(choice.probs.sum(axis=0, dtype=np.float64))
    tally[2 * e] = np.square(to_host(choice.log_sums), dtype=np.float64).sum()
    tally[2 * e + 1] = len(choice.log_sums)
    return tally


def num_experts_of(tally: np.ndarray) -> int:
    """e."""
    return (len(tally) - 2) // 2


def balance_loss(tally: np.ndarray) -> float:
    """e sum_i f_i P_i; 0 of no rows."""
    e, rows = num_experts_of(tally), max(tally[-1], 1.0)
    return float(e * (tally[:e] / rows) @ (tally[e : 2 * e] / rows))


def balance_gradient(tally: np.ndarray) -> np.ndarray:
    """Of every row's probabilities, [e]."""
    e, rows = num_experts_of(tally), max(tally[-1], 1.0)
    return e * tally[:e] / rows**2


def z_loss(tally: np.ndarray) -> float:
    """The mean of (log sum exp l)^2; 0 of no rows."""
    return float(tally[-2] / max(tally[-1], 1.0))


def z_gradient(tally: np.ndarray) -> float:
    """What log_sums [t] times probs [t, e] is to be multiplied by to be the gradient of the logits."""
    return 2.0 / max(tally[-1], 1.0)
