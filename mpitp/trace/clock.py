"""How far the ranks' clocks are apart, from messages there and back: the estimate of NTP (Mills, RFC 5905).

Rank 0 sends, the other rank answers with its time, and rank 0 takes it to be the time half-way through the round trip.
Of several rounds the quickest counts: its error is at most half of its round trip, microseconds within one node.
"""

from __future__ import annotations

import time

import numpy as np

from mpitp.comm.group import Group

ROUNDS = 8


def clock_offset(group: Group) -> float:
    """Seconds to subtract from this rank's `time.perf_counter()` to get rank 0's. A collective."""
    group.barrier()
    offsets = [0.0]
    for rank in range(1, group.size):
        if group.rank == 0:
            offsets.append(_ask(group, rank))
        elif group.rank == rank:
            _answer(group)
    return float(group.broadcast_object(offsets)[group.rank])


def _ask(group: Group, rank: int) -> float:
    best, offset = float("inf"), 0.0
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        group.send(np.zeros(1), rank)
        theirs = float(group.recv(np.zeros(1), rank)[0])
        received = time.perf_counter()
        if received - sent < best:
            best, offset = received - sent, theirs - (sent + received) / 2
    return offset


def _answer(group: Group) -> None:
    for _ in range(ROUNDS):
        group.recv(np.zeros(1), 0)
        group.send(np.array([time.perf_counter()]), 0)
