r"""Which experts a token goes to, and sorting rows by expert (Shazeer et al. 2017; GShard: Lepikhin et al. 2020).

Of logits l [t, e] of a router, k experts chosen a token:

    p    = softmax(l)                       [t, e]
    c    = the k largest of p, the first of equal ones                    chosen [t, k]
    s    = p_c,   or  p_c / sum_j p_cj  where they are normed             scores [t, k]

Backward. ds [t, k] is the gradient of the scores, g [e] what else every row of p has a gradient of (an even load):

    dp_c = ds,    or  (ds - sum_j ds_j s_j) / sum_j p_cj,   0 elsewhere;  dp += g
    dl   = p (dp - sum_i dp_i p_i)

The choice itself has no gradient. Softmax and all sums are computed in float32 at least.

A token's k copies are *assignments*, numbered token by token. `Order` sorts them by expert: experts then take
neighbouring rows, and each way, there and back, forward and backward, is a gather (no scattered additions, so the same
bits every time). The choices are few numbers, and how many rows an expert has must be known to the host: all sorting is
done there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host, to_host
from mpitp.backend.precision import widened
from mpitp.ops.cross_entropy import row_max


@dataclass(frozen=True, slots=True)
class Choice:
    """What a router has decided: probs [t, e] and log_sums [t] (log sum_i exp l_i), wide; scores [t, k]; chosen [t, k],
    int64 in host memory.
    """

    probs: Array
    log_sums: Array
    scores: Array
    chosen: np.ndarray

    @property
    def num_experts(self) -> int:
        """e."""
        return int(self.probs.shape[1])

    def of_chosen(self, table: Array) -> Array:
        """[t, k]: the chosen experts' columns of a table [t, e]."""
        return table.reshape(-1)[self.flat(array_module(table))].reshape(self.chosen.shape)

    def flat(self, xp: Any) -> Array:
        """Where these lie in the flat table."""
        rows = np.arange(len(self.chosen))[:, None] * self.num_experts
        return from_host((rows + self.chosen).reshape(-1), xp)


def choose_experts(logits: Array, top_k: int, *, normed: bool) -> Choice:
    """The `top_k` likeliest experts of each row of logits [t, e]; scores come in the dtype of the logits."""
    xp, wide = array_module(logits), widened(logits)
    largest = row_max(wide)[:, None]
    probs = xp.exp(wide - largest)
    sums = probs.sum(axis=1, keepdims=True)
    log_sums = (largest + xp.log(sums))[:, 0]
    probs /= sums
    chosen = np.argsort(-to_host(probs), axis=1, kind="stable")[:, :top_k].copy()
    choice = Choice(probs, log_sums, probs, chosen)
    scores = choice.of_chosen(probs)
    if normed:
        scores /= scores.sum(axis=1, keepdims=True)
    return Choice(probs, log_sums, scores.astype(logits.dtype, copy=False), chosen)


def choose_experts_backward(dscores: Array, choice: Choice, *, normed: bool, more: Array | None = None) -> Array:
    """dlogits [t, e], wide, of dscores [t, k]. `more`: a gradient of every row's probabilities besides, [e]."""
    xp, probs, ds = array_module(dscores), choice.probs, widened(dscores)
    if normed:
        total = choice.of_chosen(probs).sum(axis=1, keepdims=True)
        ds = (ds - (ds * widened(choice.scores)).sum(axis=1, keepdims=True)) / total
    dprobs = xp.zeros(probs.shape, probs.dtype)
    dprobs.reshape(-1)[choice.flat(xp)] = ds.reshape(-1)
    if more is not None:
        dprobs += more
    return probs * (dprobs - (dprobs * probs).sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Order:
    """Assignments sorted by expert. counts: rows of each expert, int64 [e] in host memory; n in all.

    assignments: which one each sorted row is, [n]. places: where the row of each token's choice is, [t, k]. kept
    [t, k]: 1 where it has one, 0 where its expert was full (places is 0 there); None: all have.
    """

    assignments: Array
    tokens: Array  # of each sorted row, [n]
    places: Array
    counts: np.ndarray
    kept: np.ndarray | None = None


def order_by_expert(chosen: np.ndarray, num_experts: int, xp: Any, capacity: int = 0) -> Order:
    """Sort chosen [t, k] for arrays of `xp`; an expert's rows stay in the order of their tokens. `capacity`: the most
    rows that an expert takes, the first ones; 0: all.
    """
    (t, k), flat = chosen.shape, chosen.reshape(-1)
    counts = np.bincount(flat, minlength=num_experts)
    order = np.argsort(flat, kind="stable")
    kept = None
    if capacity and counts.max(initial=0) > capacity:
        among = np.arange(t * k) - (np.cumsum(counts) - counts)[flat[order]]  # its number among its expert's rows
        dropped, order = order[among >= capacity], order[among < capacity]
        counts, kept = np.minimum(counts, capacity), np.ones((t * k), np.int64)
        kept[dropped] = 0
    places = np.zeros(t * k, np.int64)
    places[order] = np.arange(len(order))
    assignments, tokens, where = (from_host(index, xp) for index in (order, order // k, places.reshape(t, k)))
    return Order(assignments, tokens, where, counts, None if kept is None else kept.reshape(t, k))


def capacity_of(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """Rows that an expert takes of `tokens`: `factor` times an even share, rounded up (Fedus et al. 2022, eq. 3), at
    least one; 0 for a factor of 0: as many as come.
    """
    return max(1, int(np.ceil(factor * tokens * top_k / num_experts))) if factor else 0


def dispatch_forward(x: Array, order: Order) -> Array:
    """x [t, h] -> the sorted rows [n, h]."""
    return x[order.tokens]


def dispatch_backward(drows: Array, order: Order) -> Array:
    """drows [n, h] -> dx [t, h]: what a token's copies bring, in the order of its choices."""
    dx = _picked(drows, order, 0)
    for j in range(1, order.places.shape[1]):
        dx += _picked(drows, order, j)
    return dx


def combine_forward(rows: Array, scores: Array, order: Order) -> Array:
    """y [t, h] = sum_j s_j (row of the token's choice j). rows [n, h] as sorted, scores [t, k]."""
    y = _picked(rows, order, 0)
    y *= scores[:, :1]
    for j in range(1, scores.shape[1]):
        y += scores[:, j : j + 1] * _picked(rows, order, j)
    return y


def combine_backward(dy: Array, rows: Array, scores: Array, order: Order) -> tuple[Array, Array]:
    """drows [n, h] and dscores [t, k] of dy [t, h]."""
    drows = dy[order.tokens]
    drows *= scores.reshape(-1)[order.assignments][:, None]
    columns = [(widened(dy) * widened(_picked(rows, order, j))).sum(axis=1) for j in range(scores.shape[1])]
    return drows, array_module(dy).stack(columns, axis=1).astype(scores.dtype, copy=False)


def _picked(rows: Array, order: Order, j: int) -> Array:
    """[t, h]: the row of every token's choice j; noughts where it has none."""
    picked = rows[order.places[:, j]]
    if order.kept is not None:
        picked *= from_host(order.kept[:, j : j + 1].astype(rows.dtype), array_module(rows))
    return picked
