"""Where a part of a parameter lies in the Hugging Face files: pure data, filled in by each model's name table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HfPiece:
    """One part of a parameter as rows of a stored tensor.

    The part is rows `[start, start + part.size)`, along the dim in which the parameter is cut, of the tensor named
    `tensor`, which is `size` long along that dim (None: as long as the part). `transposed`: the stored tensor is the
    transpose of ours (GPT-2's Conv1D keeps weights as (in, out)); `start` and `size` count in *our* orientation.

    Example: GPT-2's `c_attn.weight` is stored as [h, 3h] and holds three parts of our [3h, h]: q at start 0, k at h and
    v at 2h, each with `size=3 * h, transposed=True`.
    """

    tensor: str
    start: int = 0
    size: int | None = None
    transposed: bool = False
