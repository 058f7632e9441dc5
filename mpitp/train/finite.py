"""Weights that aren't finite are never saved: a file that looks whole must not hold what no run can go on from."""

from __future__ import annotations

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.group import Group
from mpitp.errors import NumericError
from mpitp.layers.param import Param
from mpitp.optim.adamw import AdamW

PIECE = 1 << 20  # elements that are looked at together


def refuse_spoilt(optimizer: AdamW, step: int, world: Group) -> None:
    """Raise NumericError on all ranks, before anything is written, when weights or masters aren't finite after `step`,
    as after the last update of a diverging run, whose loss nobody has seen. A collective.
    """
    mine = next((name for name, param in optimizer.params if not _is_sound(optimizer, name, param)), None)
    found = [name for name in world.all_gather_objects(mine) if name is not None]
    if found:
        raise NumericError(
            f"weights of {found[0]} aren't finite (NaN or infinite) after step {step}: they aren't saved; a lower "
            "learning rate or a longer warmup may help (--resume auto: from the last that were)"
        )


def _is_sound(optimizer: AdamW, name: str, param: Param) -> bool:
    """What is computed with, and the masters where there are some."""
    masters = optimizer.weights(name, param)
    return _is_finite(param.data) and (masters is param.data or _is_finite(masters))


def _is_finite(x: Array) -> bool:
    flat, finite = x.reshape(-1), array_module(x).isfinite
    return all(bool(finite(flat[i : i + PIECE]).all()) for i in range(0, flat.size, PIECE))
