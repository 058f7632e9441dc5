"""13  Data parallelism: the same weights, other samples; and ZeRO, which keeps only a share of what all would hold.

    dW = sum over replicas r of dW_r           the loss is a mean over ALL targets, so each r divides by their number

An all-reduce is a reduce-scatter and an all-gather. ZeRO puts the update between the two: rank r gets the sum of its
rows of dW, has the moments m and v of these rows alone, updates them, and the new rows are gathered.

    bytes a rank, P parameters of s bytes, N replicas         weights    gradients    moments
    plain                                                     P s        P s          2 P s
    ZeRO-1                                                    P s        P s          2 P s / N
    ZeRO-2                                                    P s        P s / N      2 P s / N
    ZeRO-3  (weights gathered just before their use)          P s / N    P s / N      2 P s / N
"""

import numpy as np
from course import Watched, exercise, nbytes, on_ranks, prove, say, say_each

from mpitp.comm import Group
from mpitp.layers.partition import share_of
from mpitp.ops.adamw import AdamWRule, adamw_reference, adamw_update
from mpitp.ops.linear import linear_forward, linear_weight_grad

RANKS = 3
SAMPLES, K, N = 8, 4, 7
RULE = AdamWRule(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


def gradient(x: np.ndarray, target: np.ndarray, w: np.ndarray, count: int) -> np.ndarray:
    """dW of the mean over `count` samples of |x W^T - target|^2 / 2, these samples' part of it."""
    return linear_weight_grad((linear_forward(x, w) - target) / count, x)


def main(group: Group) -> None:
    random = np.random.default_rng(13)
    x, target, w = (random.standard_normal(shape) for shape in ((SAMPLES, K), (SAMPLES, N), (N, K)))
    mine, rows = (own_slice(units, group) for units in (SAMPLES, N))

    whole = gradient(x, target, w, SAMPLES)  # what one rank alone computes
    say(group, f"1  {SAMPLES} samples on {group.size} replicas, W [{N}, {K}] on each")
    dw = gradient(x[mine], target[mine], w, SAMPLES)
    say_each(group, f"samples {mine.start}:{mine.stop}   dW_r[0] {np.round(dw[0], 3)}")
    prove(group, "the sum of dW_r", (group.all_reduce(dw), whole))

    say(group, "\n2  The mean of the replicas' own means is another number, where shares differ")
    own_mean = gradient(x[mine], target[mine], w, max(mine.stop - mine.start, 1))
    wrong = np.abs(group.all_reduce(own_mean) / group.size - whole).max()
    say(group, f"   it is off by {wrong:.3f}: so the number of targets is summed before backward begins")

    say(group, "\n3  ZeRO: reduce-scatter, update of own rows, all-gather")
    watched = Watched(group)
    sizes = [share_of(N, rank, group.size).size for rank in range(group.size)]
    own_dw = watched.reduce_scatter(dw, sizes)  # ZeRO-2: from here on no rank needs the whole dW
    own_w, m, v = w[rows].copy(), np.zeros_like(own_dw), np.zeros_like(own_dw)
    adamw_update(own_w, own_dw, m, v, RULE)
    new_w = watched.all_gather(own_w)
    zeros = np.zeros_like(w)
    say_each(group, f"rows {rows.start}:{rows.stop} of W   moments of {m.nbytes + v.nbytes} bytes, not {2 * w.nbytes}")
    prove(group, "W after the step", (new_w, adamw_reference(w, whole, zeros, zeros, RULE)[0]))
    say(group, f"   handed in: {', '.join(f'{call.op} {nbytes(call)} bytes' for call in watched.calls)}")

    say(group, "\n4  ZeRO-3: W is gathered for a product and dropped after it, in both passes")
    for_forward = group.all_gather(own_w)
    prove(group, "y with gathered weights", (linear_forward(x[mine], for_forward), linear_forward(x[mine], new_w)))
    exercise(
        group,
        "A ring sends (p - 1) / p of n bytes for a reduce-scatter and as much for an all-gather. What do plain data "
        "parallelism, ZeRO-2 and ZeRO-3 (two gathers) send a step? Then set SAMPLES = 2: what does the third rank do?",
    )


def own_slice(units: int, group: Group) -> slice:
    """This rank's part of `units`: sizes differ by at most one."""
    span = share_of(units, group.rank, group.size).span
    return slice(span.start, span.stop)


if __name__ == "__main__":
    on_ranks(main, RANKS)
