"""Records what every layer of a model returns, forward and backward, with the type that it claims
(`trace/observe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, to_host
from mpitp.layers.array_type import PARTIAL, VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, unwrapped
from mpitp.layers.param import Param
from mpitp.layers.passes import Crossing, Pass
from mpitp.layers.rows import Rows
from mpitp.models.layered import LayeredModel
from mpitp.trace.observe import LayerObserver, Spot, observe

# Kinds of records in the order in which they are computed, and what one shows.
KINDS = {
    "start": "weights at the start",
    "y": "output",
    "dx": "gradient of the input",
    "grad": "parameter gradient",
    "value": "value",
    "update": "change of the weights",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a rank's array, or a part of it, lies in the whole. Empty: it is the whole itself, or a summand of it."""

    here: tuple[Any, ...] = ()
    there: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One array of one rank: pieces of a whole of `shape`, or, where `is_summand`, to be added to the other ranks'."""

    name: str
    kind: str  # of KINDS
    array: np.ndarray
    shape: tuple[int, ...] | None = None  # None: the array's own
    pieces: tuple[Piece, ...] = (Piece(),)
    is_summand: bool = False

    def __post_init__(self) -> None:
        if self.shape is None:
            object.__setattr__(self, "shape", self.array.shape)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Which tokens of the whole batch the rows of this rank's activations are: `total` of them there are in all.

    `inside`: those of attention, MLP, logits and loss; `between`: those of norms, dropout and residual connections.
    `texts`: which of the step's texts this rank has whole, of `num_texts`.
    """

    inside: np.ndarray
    between: np.ndarray
    total: int
    texts: np.ndarray
    num_texts: int

    @classmethod
    def of(cls, whole: Rows, own: Rows, shard: Rows) -> Tokens:
        """For the rows of the whole batch, of this rank's part of it, and of its shard of that."""
        begins = {run.sample: place.start - run.first for run, place in whole.places()}
        numbers = {run.sample: number for number, run in enumerate(whole.runs)}
        texts = np.array([numbers[run.sample] for run in own.runs if run.begins], np.int64)
        return cls(_numbers(own, begins), _numbers(shard, begins), whole.num_tokens, texts, len(whole.runs))

    def of_texts(self) -> Tokens:
        """For layers that are handed one row of each text."""
        return Tokens(self.texts, self.texts, self.num_texts, self.texts, self.num_texts)

    def of_type(self, claimed: ArrayType, count: int) -> tuple[np.ndarray | None, int]:
        """Which the `count` rows of an array of this type are, and of how many. None: all of them."""
        is_shard = claimed.along("tp") == VARYING and not claimed.columns
        rows = self.between if is_shard else self.inside
        assert count == len(rows), f"{count} rows, where {len(rows)} are expected"
        return (rows if len(rows) < self.total or is_shard else None), self.total


NO_ROWS = Rows(())


def _numbers(rows: Rows, begins: Mapping[int, int]) -> np.ndarray:
    """The place in the whole batch of every row, int64 [t]."""
    numbers = [np.arange(run.length) + run.first + begins[run.sample] for run in rows.runs]
    return np.concatenate([np.zeros(0, np.int64), *numbers])


@dataclass(slots=True)
class Log(LayerObserver):
    """The records of one step, in the order in which they were made: what layers return, `y` forward, `dx` backward.

    Each is of the tokens of the microbatch that it belongs to: forward the pass tells which, backward the context.
    """

    whole: Rows = NO_ROWS  # of the whole step, the microbatches of all ranks
    source: Rows = NO_ROWS  # the same of what an encoder reads that has a decoder
    records: list[Record] = field(default_factory=list)
    is_open: bool = True
    of_texts: frozenset[str] = frozenset()  # layers of the model whose rows are texts
    _tokens: Tokens = field(default_factory=lambda: Tokens.of(NO_ROWS, NO_ROWS, NO_ROWS))
    _of_context: dict[int, Tokens] = field(default_factory=dict)
    _around: tuple[Pass, Tokens] | None = None  # of the layer that holds the one which runs

    def add(self, name: str, kind: str, array: Array, **place: Any) -> None:
        """Keep a copy in host memory; nothing while the log is closed."""
        if self.is_open:
            self.records.append(Record(name, kind, np.array(to_host(array)), **place))

    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if not self.is_open:
            return run()
        tokens, around, before = self._tokens_of(phase, args), self._around, self._tokens
        tokens = tokens.of_texts() if spot.name in self.of_texts else tokens
        self._tokens = tokens
        if phase == FORWARD and len(args) > 1 and isinstance(args[-1], Pass):
            self._around = (args[-1], tokens)
        result = run()
        self._around = around
        if phase == FORWARD and self._reads_memory(args[0]):
            self._tokens = before
        if phase == FORWARD:
            if result[1] is not None:
                self._of_context[id(result[1])] = tokens
            given = tokens.of_texts() if spot.layer.gives_a_row_a_sequence else tokens
            self.add(spot.name, "y", result[0], **place_of(result[0], spot.outgoing, given))
        elif result is not None:
            self.add(spot.name, "dx", result, **place_of(result, spot.incoming.gradient, tokens))
        return result

    def _tokens_of(self, phase: str, args: tuple[Any, ...]) -> Tokens:
        second = args[-1] if len(args) > 1 else None
        if phase == FORWARD and isinstance(second, Pass):
            if self._around is None:
                return self._of_pass(second)
            run, tokens = self._around
            return tokens if second.rows == run.rows else tokens.of_texts()
        if isinstance(second, Crossing):  # where backward turns from the decoder's rows to the source's
            return self._of_pass(second.source)
        if phase == FORWARD and self._reads_memory(args[0]):
            assert self._around is not None and self._around[0].crossing is not None
            return self._of_pass(self._around[0].crossing.source)
        return self._of_context.get(id(second), self._tokens) if phase == BACKWARD else self._tokens

    def _of_pass(self, run: Pass) -> Tokens:
        """Which tokens a pass is of; one of a source, beside a decoder's, has no crossing."""
        is_source = run.crossing is None and bool(self.source.runs)
        return Tokens.of(self.source if is_source else self.whole, run.rows, run.shard_rows)

    def _reads_memory(self, x: Array) -> bool:
        """Whether a layer inside a decoder's block is given the encoder's output."""
        crossing = None if self._around is None else self._around[0].crossing
        return crossing is not None and x is crossing.memory


def place_of(array: Array, claimed: ArrayType, tokens: Tokens) -> dict[str, Any]:
    """Where an activation of this type lies in the whole: which rows and columns of it; whether it is a summand."""
    rows, total = tokens.of_type(claimed, len(array))
    first = slice(None) if rows is None else rows
    shape = (array.shape[0] if rows is None else total, *array.shape[1:])
    is_summand = any(letter == PARTIAL for _, letter in claimed.letters)
    if not claimed.columns or is_summand:
        return {"shape": shape, "pieces": (Piece((), (first,)),), "is_summand": is_summand}
    pieces, here, there = [], 0, 0
    for _, cut in claimed.columns:
        held = slice(there + cut.held.start, there + cut.held.stop)
        pieces.append(Piece((..., slice(here, here + len(cut.held))), (first, held)))
        here, there = here + len(cut.held), there + cut.size
    return {"shape": (*shape[:-1], there), "pieces": tuple(pieces)}


def place_of_param(param: Param) -> dict[str, Any]:
    """Where a parameter's array lies: its parts one after the other, each whole."""
    fused, pieces, there = param.placement.fused, [], 0
    shape = param.placement.parts[0].shape
    for part, here in param.placement.places():
        index = list(part.index)
        index[fused] = slice(there + index[fused].start, there + index[fused].stop)
        pieces.append(Piece(here, tuple(index)))
        there += part.shape[fused]
    return {"shape": shape[:fused] + (there,) + shape[fused + 1 :], "pieces": tuple(pieces)}


def record_layers(model: LayeredModel) -> Log:
    """Record every layer of `model` from now on, into the log that is returned."""
    log = Log(of_texts=frozenset(_behind_texts(model)))
    observe(model, log)
    return log


def _behind_texts(model: LayeredModel) -> Iterator[str]:
    """The layers of a model behind the one that gives a row a text."""
    is_behind = False
    for name, layer in model.all_layers().items():
        if is_behind:
            yield name
        is_behind = is_behind or unwrapped(layer).gives_a_row_a_sequence


def record_params(named_params: Iterable[tuple[str, Param]], log: Log, kind: str) -> None:
    """Add every parameter's gradient (`kind` "grad") or value to the log."""
    for name, param in named_params:
        array = param.grad_or_zeros() if kind == "grad" else param.data
        log.add(name, kind, array, **place_of_param(param))


def record_updates(model: LayeredModel, log: Log) -> None:
    """Add what every parameter has changed by since it was recorded at the start.

    The change tells more than the new weights, most of whose digits are the old ones'.
    """
    start = {record.name: record.array for record in log.records if record.kind == "start"}
    for name, param in model.named_params():
        log.add(name, "update", to_host(param.data) - start[name], **place_of_param(param))
