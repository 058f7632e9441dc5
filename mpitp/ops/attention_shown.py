"""What attention never holds, whole: its scores, its mask and its softmax, to be looked at.

    S_h = scale q_h k_g^T (changed),   P_h = softmax(S_h where the mask is 1),   o_h = P_h v_g

Plain and with all of t x t in memory: for passes that are shown, not for ones that are fast (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.ops.attention import HeadMap
from mpitp.ops.sight import Sight


def seen_by(sight: Sight, t: int) -> np.ndarray:
    """Which of t keys each of t queries of one sequence sees: booleans [t, t]."""
    seen = np.zeros((t, t), bool)
    for block in sight.query_blocks(np, t, t):
        for tile in block.tiles:
            at = seen[tile.queries, tile.keys]
            query, key = np.arange(at.shape[0])[:, None], np.arange(at.shape[1])[None, :]
            at |= (key >= tile.unseen + query) & (key < tile.seen + query)
    return seen


def block_diagonal(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """The blocks along the diagonal, False elsewhere: sequences don't see one another."""
    parts = list(blocks)
    t, start = sum(len(part) for part in parts), 0
    whole = np.zeros((t, t), bool)
    for part in parts:
        stop = start + len(part)
        whole[start:stop, start:stop] = part
        start = stop
    return whole


def scores_and_softmax(q: Array, k: Array, seen: np.ndarray, heads: HeadMap) -> tuple[Array, Array]:
    """S and P [a, t, u] of q [t, a, d] and k [u, g, d]. Positions are counted from the first row."""
    xp, t, u = array_module(q), q.shape[0], k.shape[0]
    scores = xp.empty((q.shape[1], t, u), q.dtype)
    for head, kv in enumerate(heads.kv_index):
        scores[head] = heads.scale * (q[:, head] @ k[:, kv].T)
        if heads.change is not None:
            heads.change.forward(scores[head], head, range(t), range(u))
    hidden = xp.where(xp.asarray(seen), scores, -xp.inf)
    p = xp.exp(hidden - hidden.max(axis=2, keepdims=True))
    return scores, p / p.sum(axis=2, keepdims=True)
