"""Whole Hugging Face tensors put together from the ranks' pieces, by the rules of `HfPiece` and `Placement` alone.

What is put together here doesn't go through `mpitp.checkpoint`, so that the two check one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpitp.comm import Group
from mpitp.models import CausalLM


def owned_pieces(model: CausalLM, attribute: str) -> Iterator[tuple[str, tuple[np.ndarray, ...], np.ndarray]]:
    """(tensor name, where it lies in the stored tensor, values) of everything this rank owns.

    `attribute` is "data" or "grad".
    """
    pieces = model.hf_pieces()
    for name, param in model.named_params():
        array, dim = getattr(param, attribute), param.placement.fused
        for part, place in param.placement.owned():
            piece = pieces[name, part.name]
            values, where = array[place], [np.arange(rows.start, rows.stop) for rows in part.owned]
            units = where[dim] // piece.unit if piece.unit else 0  # the part's units lie `stride` apart
            where[dim] = piece.start + where[dim] + units * (piece.stride - piece.unit)
            if piece.stacked:
                for number, one in zip(where[0], values, strict=True):
                    yield piece.tensor.format(number), np.ix_(*where[1:]), one.copy()
                continue
            if piece.transposed:
                values, where = values.T, where[::-1]
            yield piece.tensor, np.ix_(*where), values.copy()


def global_tensors(model: CausalLM, group: Group, attribute: str, like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor named in `like` on every rank; fails unless each element is owned exactly once."""
    whole = {name: np.zeros(array.shape) for name, array in like.items()}
    owners = {name: np.zeros(array.shape, int) for name, array in like.items()}
    for pieces in group.all_gather_objects(list(owned_pieces(model, attribute))):
        for name, where, values in pieces:
            whole[name][where] += values
            owners[name][where] += 1
    wrong = {name: (count.min(), count.max()) for name, count in owners.items() if (count != 1).any()}
    assert not wrong, f"least and most owners of an element, which must be 1: {wrong}"
    return whole
