"""Where a part of a parameter lies in the Hugging Face files: pure data, filled in by each model's name table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class HfPiece:
    """One part of a parameter as rows of a stored tensor.

    The part is rows `[start, start + part.size)`, along the dim in which the parameter is cut, of the tensor named
    `tensor`, which is `size` long along that dim (None: as long as the part). `transposed`: the stored tensor is the
    transpose of ours (GPT-2's Conv1D keeps weights as (in, out)); `start` and `size` count in *our* orientation.

    Where parts are dealt in turn, `unit` rows of one and then of the next, the part's units begin at `start`, `start +
    stride`, ... (0: they are neighbours).

    stacked: experts, of which the part has one behind the other along dim 0, each in a tensor of its own; `tensor` has
    their number in the place of {} (0: the part is one tensor).

    Example: GPT-2's `c_attn.weight` is stored as [h, 3h] and holds three parts of our [3h, h]: q at start 0, k at h and
    v at 2h, each with `size=3 * h, transposed=True`. GPT-NeoX has q, k and v of the first head, then of the second: q
    at start 0, k at d and v at 2d, each with `unit=d, stride=3 * d`.
    """

    tensor: str
    start: int = 0
    size: int | None = None
    transposed: bool = False
    unit: int = 0
    stride: int = 0
    stacked: int = 0

    def tensors(self) -> list[str]:
        """The names of all tensors that the part lies in."""
        return [self.tensor.format(i) for i in range(self.stacked)] if self.stacked else [self.tensor]

    def of_expert(self, number: int) -> HfPiece:
        """That of one of the experts."""
        return replace(self, tensor=self.tensor.format(number), stacked=0)

    def runs(self, rows: range) -> Iterator[tuple[int, range]]:
        """These rows of the part as neighbours in the stored tensor: where each run begins there, and its rows.

        >>> list(HfPiece("w", start=2, unit=2, stride=6).runs(range(1, 5)))
        [(3, range(1, 2)), (8, range(2, 4)), (14, range(4, 5))]
        """
        if not self.unit:
            yield self.start + rows.start, rows
            return
        first = rows.start
        while first < rows.stop:
            number, inside = divmod(first, self.unit)
            stop = min(rows.stop, (number + 1) * self.unit)
            yield self.start + number * self.stride + inside, range(first, stop)
            first = stop


def dense_pieces(name: str, part: str, hf_name: str, *, has_bias: bool = True) -> dict[tuple[str, str], HfPiece]:
    """Weight and bias of a linear in tensors of their own; the bias of a row-parallel one ("out", "down") isn't cut."""
    pieces = {(f"{name}.weight", part): HfPiece(f"{hf_name}.weight")}
    if has_bias:
        pieces[f"{name}.bias", "" if part in ("out", "down") else part] = HfPiece(f"{hf_name}.bias")
    return pieces


def norm_pieces(name: str, hf_name: str) -> dict[tuple[str, str], HfPiece]:
    """Weight and bias of a LayerNorm."""
    return {(f"{name}.{kind}", ""): HfPiece(f"{hf_name}.{kind}") for kind in ("weight", "bias")}
