"""10  All-reduce from send and recv: a ring for large arrays, a tree for small ones.

    ring   p pieces; p - 1 steps that add (reduce-scatter), p - 1 that copy (all-gather)
           time = 2 (p - 1) (latency + (n / p) / bandwidth)             least bytes
    tree   halves the number of ranks in each step towards rank 0, and goes back the same way
           time = 2 log2(p) (latency + n / bandwidth)                   least steps

A send may wait for its recv. If every rank of a ring sent first, each would wait for the next one for ever; so even
ranks send first and odd ranks receive first. (With an odd p, ranks p - 1 and 0 both send first: a chain, no circle.)
"""

import statistics
import time

import numpy as np
from course import Watched, exercise, nbytes, on_ranks, prove, say

from mpitp.comm import Group

RANKS = 4
SIZES = 1 << 8, 1 << 19  # numbers of 8 bytes


def exchange(group: Group, x: np.ndarray, dest: int, like: np.ndarray, source: int) -> np.ndarray:
    """Send x to one neighbour and receive from the other, without a deadlock."""
    if group.rank % 2 == 0:
        group.send(x, dest)
        return group.recv(like, source)
    received = group.recv(like, source)
    group.send(x, dest)
    return received


def ring_all_reduce(group: Group, x: np.ndarray) -> np.ndarray:
    """The sum of every rank's x [n]."""
    p, rank = group.size, group.rank
    pieces = np.array_split(x.copy(), p)
    right, left = (rank + 1) % p, (rank - 1) % p
    for step in range(p - 1):  # afterwards this rank has the whole sum of piece rank + 1
        out, into = pieces[(rank - step) % p], pieces[(rank - step - 1) % p]
        into += exchange(group, out, right, into, left)
    for step in range(p - 1):
        out, into = pieces[(rank + 1 - step) % p], pieces[(rank - step) % p]
        into[...] = exchange(group, out, right, into, left)
    return np.concatenate(pieces)


def tree_all_reduce(group: Group, x: np.ndarray) -> np.ndarray:
    """The sum of every rank's x [n]: a binomial tree up to rank 0, and down again."""
    p, rank, total = group.size, group.rank, x.copy()
    strides = [1 << i for i in range((p - 1).bit_length())]  # 1, 2, 4, ... < p
    for stride in strides:
        if rank % (2 * stride) == stride:
            group.send(total, rank - stride)
        elif rank % (2 * stride) == 0 and rank + stride < p:
            total += group.recv(total, rank + stride)
    for stride in reversed(strides):
        if rank % (2 * stride) == 0 and rank + stride < p:
            group.send(total, rank + stride)
        elif rank % (2 * stride) == stride:
            total = group.recv(total, rank - stride)
    return total


ALGORITHMS = {"ring": ring_all_reduce, "tree": tree_all_reduce, "library": lambda group, x: group.all_reduce(x)}


def seconds(group: Group, algorithm: str, x: np.ndarray) -> float:
    """Median time of the slowest rank."""
    times = []
    for _ in range(7):
        group.barrier()
        started = time.perf_counter()
        ALGORITHMS[algorithm](group, x)
        times.append(float(group.all_reduce(np.array([time.perf_counter() - started]), op="max")[0]))
    return statistics.median(times)


def main(group: Group) -> None:
    x = np.random.default_rng(group.rank).standard_normal(1001)  # not a multiple of p: pieces differ
    for name in ("ring", "tree"):
        watched = Watched(group)
        y = ALGORITHMS[name](watched, x)
        prove(group, f"{name} against the library", (y, group.all_reduce(x)))
        prove(group, f"{name}: the same bits on every rank", (y, group.broadcast(y)), limit=0.0)
        sent = group.all_gather_objects([nbytes(call) for call in watched.calls if call.op == "send"])
        say(group, f"       sends by rank {[len(s) for s in sent]}, bytes by rank {[sum(s) for s in sent]}\n")
    say(group, f"{'time':<12}" + "".join(f"{8 * n:>16,} bytes" for n in SIZES))
    for name in ALGORITHMS:
        say(group, f"{name:<12}" + "".join(f"{1e3 * seconds(group, name, np.ones(n)):>19.3f} ms" for n in SIZES))
    exercise(
        group,
        "Let every rank send first: put  True  for  group.rank % 2 == 0. Threads don't mind (their send "
        "copies and goes on). Under mpirun the ring hangs, and only at 4 MiB: why? (Ctrl-C ends it.)",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
