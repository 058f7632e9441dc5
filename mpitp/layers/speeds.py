"""How fast the ranks of a job are beside one another, and what that makes their weights (`comm/weights.py`).

A rank does the products of a small linear layer over and over (forward y = x w^T, backward dx = dy w and dw = dy^T x)
for as long as a window lasts, and counts them. All ranks do so at once, as in a step, since they may share cores and
memory. Windows are longer than the periods in which a scheduler's quota is given out (0.1 s on Linux); the best of
several counts: what disturbs one rank for a moment shouldn't decide how a whole run is dealt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import synchronize
from mpitp.backend.device import Device
from mpitp.backend.precision import wide_dtype
from mpitp.comm.group import Group
from mpitp.comm.mesh import AXES

WINDOWS, WINDOW_SECONDS = 5, 0.4
ROWS, MOST_WIDTH = 128, 512
NOISE = 0.1  # speeds that are nearer than this are equal

DEALT_FIRST = ("tp", "ep", "pp", "dp")  # what is finest first


def measure_speeds(group: Group, device: Device, dtype: Any, width: int) -> list[float]:
    """Every rank's speed at products [128, width] x [4 width, width], those of the fastest 1. A collective."""
    width, xp, kind = min(width, MOST_WIDTH), device.xp, wide_dtype(np.dtype(dtype))
    x, dy, w = (xp.ones(shape, kind) for shape in ((ROWS, width), (ROWS, 4 * width), (4 * width, width)))

    def one_round() -> None:
        x @ w.T, dy @ w, dy.T @ x
        synchronize(xp)

    best = 0.0
    one_round()
    for _ in range(WINDOWS):
        group.barrier()
        best = max(best, _rounds_a_second(one_round))
    speeds = group.all_gather_objects(best)
    return [speed / max(speeds) for speed in speeds]


def _rounds_a_second(one_round: Any) -> float:
    rounds, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < WINDOW_SECONDS:
        one_round()
        rounds += 1
    return rounds / seconds


def weights_of_speeds(
    speeds: Sequence[float], sizes: Mapping[str, int], axes: Sequence[str] = DEALT_FIRST
) -> dict[str, tuple[float, ...]]:
    """Weights along the axes of a mesh of `sizes`, out of one speed a rank; axes along which nobody is slower are left
    out. `axes`: those that may have weights, in the order in which they get them.

    A place along an axis is as fast as the slowest of its ranks. What tp has evened out (a rank with half of the work
    is as good as a twice as fast one) the next axis need not: speeds are divided by the weights already given.
    """
    left = np.array(speeds, np.float64).reshape([sizes[axis] for axis in AXES])
    found = {}
    for axis in axes:
        dim = AXES.index(axis)
        others = tuple(d for d in range(left.ndim) if d != dim)
        slowest = left.min(axis=others, keepdims=True)
        slowest /= slowest.max()
        if slowest.min() < 1 - NOISE:
            weights = np.maximum(np.round(slowest, 3), 1e-3)
            found[axis] = tuple(float(weight) for weight in weights.ravel())
            left = left / weights
    return found


def told(speeds: Sequence[float], weights: Mapping[str, Sequence[float]]) -> str:
    """What was found, in a line; the weights as a run file takes them."""
    each = ", ".join(f"{speed:.2f}" for speed in speeds[:16]) + (", ..." if len(speeds) > 16 else "")
    table = ", ".join(f"{axis} = {list(own)}" for axis, own in weights.items())
    return f"speeds of the ranks {each}; " + (f"dealt by {{ {table} }}" if table else "equal")
