"""Weights of the ranks along the axes of a mesh: what a rank gets of all that is dealt along an axis, in any unit.

    {"tp": (2, 1), "dp": (1, 1, 3)}        an axis that isn't named deals evenly

Along tp heads, FFN columns and words of the vocabulary are dealt (and rows of tokens, under sequence parallelism),
along pp blocks, along dp and ep microbatches, along ep experts. A rank of weight 0 gets nothing; a stage can't have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from mpitp.errors import ConfigError

Weights = Mapping[str, Sequence[float]]
WEIGHTED = ("pp", "dp", "ep", "tp")  # cp cuts a sequence where the halves of its triangle are equal


def check_weights(weights: Weights, sizes: Mapping[str, int]) -> dict[str, tuple[float, ...]]:
    """The weights of a mesh of these sizes, without those that are equal. Raises ConfigError for what none can be."""
    for axis, own in weights.items():
        named = f"mesh.shares along {axis} = {list(own)}"
        if axis not in WEIGHTED:
            raise ConfigError(f"{named}: nothing is dealt by weight along {axis!r}; expected {', '.join(WEIGHTED)}")
        if len(own) != sizes[axis]:
            raise ConfigError(
                f"{named} has {_count(len(own), 'weight')}, but mesh.{axis} has {_count(sizes[axis], 'rank')}; "
                "name one weight a rank"
            )
        if not all(isfinite(weight) and weight >= 0 for weight in own) or not any(own):
            raise ConfigError(f"{named}: expected finite weights of at least 0, and one above 0")
        if axis == "pp" and not all(own):
            raise ConfigError(f"{named}: a stage has at least one block; expected weights above 0")
    return {axis: tuple(map(float, own)) for axis, own in weights.items() if len(set(own)) > 1}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
