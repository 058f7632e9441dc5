"""Refuses numbers that nothing can be compared with: NaN and infinities in the weights, or in what the oracle makes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.errors import NumericError
from mpitp.models.layered import LayeredModel
from mpitp.verify.record import KINDS, Record

MOST_NAMED = 3  # tensors


def refuse_weights(model: LayeredModel) -> None:
    """Raise NumericError, on all ranks, when weights are not finite: how many, and in which tensors. A collective."""
    counts: dict[str, np.ndarray] = {}  # tensor as its file calls it: values that aren't finite, values
    for rank in model.site.ranks.all_gather_objects(_counts(model)):
        for tensor, pair in rank.items():
            counts[tensor] = counts.get(tensor, np.zeros(2, np.int64)) + pair
    bad = [f"{tensor} ({wrong} of {size} values)" for tensor, (wrong, size) in counts.items() if wrong]
    if bad:
        more = f" and {len(bad) - MOST_NAMED} more tensors" if len(bad) > MOST_NAMED else ""
        raise NumericError(
            f"weights are not finite (NaN or infinite), so there is nothing to compare: {', '.join(bad[:MOST_NAMED])}"
            f"{more}"
        )


def _counts(model: LayeredModel) -> dict[str, np.ndarray]:
    """Of this rank's own rows: each element of the model counts on one rank only."""
    pieces, counts = model.hf_pieces(), dict[str, np.ndarray]()
    for name, param in model.named_params():
        for part, place in param.placement.owned():
            values = to_host(param.data[place])
            piece = pieces.get((name, part.name))
            tensor = piece.tensor if piece else name  # a layer of the user's own has no name in files
            wrong = values.size - np.count_nonzero(np.isfinite(values))
            counts[tensor] = counts.get(tensor, np.zeros(2, np.int64)) + (wrong, values.size)
    return counts


def refusal_of(oracle: Sequence[Record]) -> NumericError | None:
    """The error to raise when the one-rank model, from finite weights, came to numbers that are not."""
    for record in oracle:
        wrong = record.array.size - np.count_nonzero(np.isfinite(record.array))
        if wrong:
            return NumericError(
                f"the one-rank model's own numbers are not finite, so there is nothing to compare them with: first in "
                f"{record.name} ({KINDS[record.kind]}), {wrong} of {record.array.size} values are NaN or infinite"
            )
    return None
