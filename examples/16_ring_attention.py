"""16  Context parallelism: one long sequence cut over ranks, its keys going round in a ring.

    o_i = sum over all j <= i of p_ij v_j        p = softmax of q_i k_j: the sum and the maximum run over ALL keys

A softmax can be put together from pieces. A piece of keys gives o and lse = log sum exp(scores); two pieces give

    lse' = log(exp(lse) + exp(lse2))      o' = o exp(lse - lse') + o2 exp(lse2 - lse')

so a rank needs one other rank's k and v at a time, and the next are on their way meanwhile. Under a causal mask the
early rows see little and the late ones much: rank c gets pieces c and 2p - 1 - c, and all have as much to do.
"""

import numpy as np
from course import Watched, exercise, nbytes, on_ranks, prove, say, say_each

from mpitp.comm import Group
from mpitp.layers import Rows
from mpitp.ops.attention import attention_reference

RANKS = 3
TOKENS, DIM = 14, 4
SCALE = DIM**-0.5


def piece(q, k, v, q_positions, k_positions):
    """o [s, d] and lse [s] of these queries over these keys; nothing seen: o = 0, lse = -inf."""
    scores = SCALE * q @ k.T
    scores[k_positions[None, :] > q_positions[:, None]] = -np.inf
    largest = np.maximum(scores.max(axis=1, initial=-np.inf), -1e30)  # a row that sees nothing stays at -inf
    p = np.exp(scores - largest[:, None])
    total = p.sum(axis=1)
    with np.errstate(divide="ignore"):
        return p @ v / np.maximum(total, 1e-300)[:, None], largest + np.log(total)


def join(o, lse, o2, lse2):
    """What both pieces together give."""
    both = np.logaddexp(lse, lse2)
    some = np.where(np.isneginf(both), 0.0, both)
    return o * np.exp(lse - some)[:, None] + o2 * np.exp(lse2 - some)[:, None], both


def main(group: Group) -> None:
    q, k, v = np.random.default_rng(16).standard_normal((3, TOKENS, DIM))
    whole = attention_reference(q[:, None], k[:, None], v[:, None], [0], SCALE)[:, 0]  # all scores at once

    rows = Rows.of((TOKENS,)).cut(group.rank, group.size)  # the library's own cut: an early and a late run
    mine = np.concatenate([np.arange(run.first, run.first + run.length) for run in rows.runs])
    say(group, f"{TOKENS} tokens on {group.size} ranks")
    say_each(group, f"positions {mine.tolist()}: {int((mine + 1).sum())} pairs of a query and a key")
    straight = np.array_split(np.arange(TOKENS), group.size)
    say(group, f"  in one piece a rank it would be {[int((part + 1).sum()) for part in straight]} pairs\n")

    watched = Watched(group)
    o, lse = np.zeros((len(mine), DIM)), np.full(len(mine), -np.inf)
    counts = group.all_gather_objects(len(mine))
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    here = np.concatenate([k[mine], v[mine], mine[:, None]], axis=1)  # keys, values and where they are
    for step in range(group.size):
        source = (group.rank - step) % group.size  # whose keys are here
        last = step == group.size - 1
        if not last:  # the exchange runs behind the work below
            coming = watched.start_recv(np.empty((counts[(source - 1) % group.size], 2 * DIM + 1)), left)
            going = watched.start_send(here, right)
        o, lse = join(o, lse, *piece(q[mine], here[:, :DIM], here[:, DIM:-1], mine, here[:, -1]))
        say(group, f"step {step}: rank 0 looks at the keys of rank {source}")
        if not last:
            here = coming.wait()
            going.wait()
    sent = sum(nbytes(call) for call in watched.calls if "send" in call.op)
    say_each(group, f"sent {sent} bytes, held {here.nbytes} of keys and values at a time")
    prove(group, "attention in a ring", (o, whole[mine]))
    exercise(
        group,
        "Which steps could a rank skip under the causal mask, and does that shorten the whole? Cut the rows straight "
        "(mine = straight[group.rank]): it still holds. Which rank would all the others wait for?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
