"""Cuts, bytes and memory in closed form, for the page's sliders: what any number of ranks would hold and send.

    N units over p ranks       the first N mod p ranks have one more
    KV heads of a rank         those that its query heads use: head i uses KV head i // (a / g)
    parameters of a rank       sum over units (heads, KV heads, FFN columns, vocabulary rows) of their number times the
                               elements of one, and what every rank holds whole
    handed in by each rank     t s (elements a token forward + backward + 2 d for each shared KV head of each block)

The elements of one unit are counted from the model itself on one rank, so this knows no kind of model. The page has
the same formulas in its own language (`web/sliders.js`); a test holds both to what a film has counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpitp.comm.serial import SerialGroup
from mpitp.layers.algebra import UNITS
from mpitp.layers.layer import BACKWARD, FORWARD, walk
from mpitp.layers.param import Param
from mpitp.layers.partition import share_heads, share_of
from mpitp.layers.site import make_site
from mpitp.models.config import DecoderConfig
from mpitp.models.registry import abstract_model

WHOLE, HEADS, KV_HEADS, COLUMNS, VOCABULARY = "whole", "heads", "KV heads", "FFN columns", "vocabulary"


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model in numbers. `elements`: of one unit of each kind; `sent`: elements a token that a rank hands in."""

    tokens: int
    itemsize: int
    layers: int
    head_dim: int
    units: dict[str, int]
    elements: dict[str, int]
    sent: dict[str, int]

    @classmethod
    def of(cls, config: DecoderConfig, tokens: int) -> Sizes:
        """Counted from the model on one rank, without its memory."""
        model = abstract_model(config, make_site(SerialGroup()))
        units = {WHOLE: 1, HEADS: config.heads, KV_HEADS: config.kv_heads}
        units |= {COLUMNS: config.ffn_hidden, VOCABULARY: config.vocab_size}
        totals = dict.fromkeys(units, 0)
        for _, param in model.named_params():
            for unit, count in _by_unit(param):
                totals[unit] += count
        sent = dict.fromkeys((FORWARD, BACKWARD), 0)
        for _, layer in walk(model.all_layers()):
            for send in layer.sends():
                sent[send.phase] += send.calls * send.width
        elements = {unit: total // units[unit] for unit, total in totals.items()}
        return cls(tokens, model.dtype.itemsize, config.num_layers, config.head_dim, units, elements, sent)

    def as_dict(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RankCut:
    """What one rank holds of each kind of unit, its parameters, and what it hands to collectives in a pass."""

    query: range
    kv: range
    columns: range
    vocabulary: range
    params: int
    handed_bytes: int


def cuts(sizes: Sizes, ranks: int) -> list[RankCut]:
    """Every rank's."""
    return [_cut(sizes, rank, ranks) for rank in range(ranks)]


def _cut(sizes: Sizes, rank: int, ranks: int) -> RankCut:
    heads = share_heads(sizes.units[HEADS], sizes.units[KV_HEADS], rank, ranks)
    columns, vocabulary = (share_of(sizes.units[unit], rank, ranks).span for unit in (COLUMNS, VOCABULARY))
    held = {WHOLE: 1, HEADS: heads.query.size, KV_HEADS: len(heads.kv)}
    held |= {COLUMNS: len(columns), VOCABULARY: len(vocabulary)}
    params = sum(count * sizes.elements[unit] for unit, count in held.items())
    shared = 2 * sizes.head_dim * len(heads.kv_shared) * sizes.layers
    handed = sizes.tokens * sizes.itemsize * (sum(sizes.sent.values()) + shared)
    return RankCut(heads.query.span, heads.kv, columns, vocabulary, params, handed)


def _by_unit(param: Param) -> list[tuple[str, int]]:
    """What each part of a parameter is dealt by, and its elements."""
    found = []
    for part in param.placement.parts:
        elements = 1
        for dim in part.dims:
            elements *= dim.size
        is_cut = any(dim.axis for dim in part.dims)
        found.append((_unit_of(part.name) if is_cut else WHOLE, elements))
    return found


def _unit_of(part: str) -> str:
    return KV_HEADS if part in ("k", "v") else UNITS[part]
