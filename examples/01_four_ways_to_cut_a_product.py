"""01  One matrix product cut in four ways: which must communicate, and why.

    y = x W^T        y[i, j] = sum over k of x[i, k] W[j, k]        x [t, k], W [n, k], y [t, n]

Cut t or n, and a rank has all it needs for its own elements of y: y is varying (V), each rank has its own piece. Cut k,
the dim that is summed over, and y is partial (P): every rank has a summand of every element, right in shape and wrong
in value until it is added up over the ranks. Then it is invariant (I): equal on all of them.
"""

import numpy as np
from course import exercise, on_ranks, prove, say, say_each

from mpitp.comm import Group
from mpitp.layers.partition import share_of
from mpitp.ops.linear import linear_forward

RANKS = 3
T, K, N = 4, 6, 5


def main(group: Group) -> None:
    random = np.random.default_rng(57)
    x = random.integers(-3, 4, (T, K)).astype(float)  # whole numbers: their sums are exact
    w = random.integers(-3, 4, (N, K)).astype(float)
    y = linear_forward(x, w)  # what one rank alone computes
    t, n, k = (own_slice(units, group) for units in (T, N, K))

    say(group, f"y = x W^T on {group.size} ranks, x [{T}, {K}], W [{N}, {K}]; whole y:\n{y}\n")

    say(group, "1  Cut t, the rows of x (data parallel). W on every rank; no communication.")
    own = linear_forward(x[t], w)
    say_each(group, f"x {x[t].shape}  W {w.shape}  ->  y rows {t.start}:{t.stop}  V")
    prove(group, "a rank's rows of y", (own, y[t]))

    say(group, "\n2  Cut n, the rows of W (column-parallel). x on every rank; no communication.")
    own = linear_forward(x, w[n])
    say_each(group, f"x {x.shape}  W {w[n].shape}  ->  y columns {n.start}:{n.stop}  V")
    prove(group, "a rank's columns of y", (own, y[:, n]))

    say(group, "\n3  Cut k, columns of x and of W (row-parallel). Partial sums; an all-reduce.")
    y_partial = linear_forward(x[:, k], w[:, k])
    say_each(group, f"x {x[:, k].shape}  W {w[:, k].shape}  ->  first row of partial y {y_partial[0]}")
    summed = group.all_reduce(y_partial)
    say(group, f"  their sum                                {summed[0]}")
    prove(group, "the sum of the partial y", (summed, y))

    say(group, "\n4  Cut t of x and n of W: rows meet columns elsewhere. An all-gather first.")
    gathered = group.all_gather(x[t], dim=0)
    own = linear_forward(gathered, w[n])
    say_each(group, f"x {x[t].shape} gathered to {gathered.shape}  W {w[n].shape}  ->  y {own.shape}")
    prove(group, "after gathering x", (own, y[:, n]))
    say(group, f"   gathered: x, {x.size} numbers; it could have been W, {w.size} numbers")

    exercise(
        group,
        "When is it cheaper to gather W than x in form 4? Change T, K, N at the top so that it is. (Gathering weights "
        "is what FSDP and ZeRO-3 do.) Then set K = 2: on 3 ranks one has no term of any sum; what is its partial y?",
    )


def own_slice(units: int, group: Group) -> slice:
    """This rank's part of `units`: sizes differ by at most one."""
    span = share_of(units, group.rank, group.size).span
    return slice(span.start, span.stop)


if __name__ == "__main__":
    on_ranks(main, RANKS)
