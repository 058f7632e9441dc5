r"""A model on a machine, layer by layer: seconds of a microbatch's passes, bytes kept for backward, bytes of weights.

One row a layer, for one rank of tp and one way of cutting a microbatch; all else about a layout is arithmetic on sums
of rows (`cost.py`). Blocks that are alike are looked at once, and only those layers are ever built, without memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np

from mpitp.backend.precision import is_half, wide_dtype
from mpitp.comm.mesh import abstract_mesh
from mpitp.layers.attention import AttentionHeads, SelfAttention
from mpitp.layers.layer import Layer, walk
from mpitp.layers.mixture import MixtureOfExperts
from mpitp.layers.param import Param
from mpitp.layers.partition import piece_of
from mpitp.layers.recompute import Recompute, recomputing
from mpitp.layers.rotary import Rotary
from mpitp.layers.rows import Rows
from mpitp.layers.scale import SoftCap
from mpitp.layers.shards import data_axes
from mpitp.layers.site import make_site
from mpitp.models.layered import LayeredModel
from mpitp.models.model import HEAD
from mpitp.plan.kept import INDEX_BYTES, Sizes, kept_again, kept_of, put_off
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine
from mpitp.plan.planned_models import (
    PlannedConfig,
    dealt_units,
    is_block,
    some_layers,
    tied_places,
    unit_starts,
    whole_model,
    with_recompute,
)
from mpitp.plan.sums import Behind, Span, Waits, waits_of
from mpitp.plan.trips import Beside, trips_of
from mpitp.plan.work import Both, Seconds, Sequences, Work, down_work, loss_work, seconds_of, work_of


class Of(IntEnum):
    """Columns of a layer's row: seconds of a microbatch, then bytes."""

    FORWARD = 0  # products and passes of the forward pass
    INPUT_GRAD = 1
    WEIGHT_GRAD = 2
    AGAIN = 3  # what backward runs again
    PRODUCTS = 4  # the part of products in the first three
    TP = 5  # waited for in sums over tp, both ways and again
    TP_FORWARD = 6  # the forward's part of that
    TP_HIDDEN = 7
    CP = 8  # the same over cp
    CP_FORWARD = 9
    CP_HIDDEN = 10
    KEPT = 11
    PUT_OFF = 12
    KEPT_AGAIN = 13
    EXPS = 14  # the parts of exponentials and of operations' starts in the first three
    STARTS = 15
    ATTENTION = 16
    EP = 17  # waited for in rows on their way to their experts and home, as for tp
    EP_FORWARD = 18
    EP_HIDDEN = 19
    ADDED = 20  # of adding gradients of weights to those of earlier microbatches


class Held(IntEnum):
    """Columns of a layer's weights on a rank, in bytes: stored, as they are summed, and its own rows of both."""

    STORED = 0
    WIDE = 1
    OWN_STORED = 2
    OWN_WIDE = 3
    COUNT = 4  # of parameters
    DEALT_STORED = 5  # the part of experts that are dealt over ep
    DEALT_WIDE = 6
    LARGEST = 7  # parameter that is summed over several ranks, as it is summed


@dataclass(frozen=True, slots=True)
class Cut:
    """What decides how one microbatch is cut."""

    tp: int
    cp: int
    sequence_parallel: bool
    micro: int
    ep: int = 1

    @classmethod
    def of(cls, layout: Layout) -> Cut:
        """Of a layout."""
        return cls(layout.tp, layout.cp, layout.sequence_parallel, layout.micro, layout.ep)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model is, and is trained on."""

    model: PlannedConfig
    dtype: str
    seq_len: int
    cp_form: str = "ring"


class Anatomy:
    """The rows of a model's layers on a machine."""

    def __init__(self, facts: Facts, machine: Machine) -> None:
        self.facts, self.machine = facts, machine
        machine.products.of(facts.dtype)
        whole = whole_model(facts.model, make_site(abstract_mesh({"tp": 1}), dtype=facts.dtype))
        self.names = list(whole.layers)
        self.like = _representatives(whole)  # of each layer by name, the first one that is like it
        self.unit_starts = unit_starts(self.names)  # of what is dealt to stages
        self.tied = tied_places(whole)
        self.layers = cache(self._layers)
        self.sizes = cache(self._sizes)
        self.one_sequence = cache(self._one_sequence)
        self.rows = cache(self._rows)
        self.passes = cache(self._passes)
        self.totals = cache(self._totals)
        self.kept = cache(self._kept)
        self.weights = cache(self._weights)
        self.tied_weights = cache(self._tied_weights)
        self.kinds_of_rank = cache(self._kinds_of_rank)

    @property
    def is_half(self) -> bool:
        """Whether weights have 16 bits."""
        return is_half(np.dtype(self.facts.dtype))

    def _kinds_of_rank(self, tp: int) -> list[int]:
        """One rank of tp of each kind: ranks with as many heads, KV heads, FFN columns and words do the same."""
        found: dict[tuple[int, ...], int] = {}
        for rank in range(tp):
            found.setdefault(dealt_units(self.facts.model, rank, tp), rank)
        return list(found.values())

    def _layers(
        self, tp: int, rank: int, cp: int, sequence_parallel: bool, ep: int
    ) -> tuple[LayeredModel, LayeredModel]:
        """Those that differ, on a rank of tp: as they are, and with attention that is computed again."""
        sizes = {"dp": 2, "ep": ep, "cp": cp, "tp": tp}  # dp 2: every parameter has copies along dp
        mesh = abstract_mesh(sizes, rank)
        site = make_site(mesh, dtype=self.facts.dtype, sequence_parallel=sequence_parallel, cp_form=self.facts.cp_form)
        names = [name for name in self.names if self.like[name] == name]
        plain, again = (some_layers(self.facts.model, site, names) for _ in range(2))
        wrap = recomputing("attention")
        for name in filter(is_block, names):
            again.layers[name] = with_recompute(again.layers[name], wrap)
        return plain, again

    def _sizes(self, cut: Cut, rank: int) -> Sizes:
        """Rows and bytes of a microbatch: those of one sequence, so often."""
        model, _ = self.layers(cut.tp, rank, cut.cp, cut.sequence_parallel, cut.ep)
        one = self.one_sequence(cut.cp)
        own = cut.micro * one
        shard = len(model.site.token_share(own))
        item, wide = model.dtype.itemsize, wide_dtype(model.dtype).itemsize
        is_gathered = model.site.sequence_parallel and cut.tp > 1
        hidden = self.facts.model.hidden_size
        return Sizes(own, shard, cut.micro * self.facts.seq_len, hidden, item, wide, is_gathered)

    def _one_sequence(self, cp: int) -> int:
        """Rows of a sequence on the first rank of cp."""
        rows = Rows.of((self.facts.seq_len,))
        return rows.cut(0, cp).num_tokens if cp > 1 else rows.num_tokens

    def tables(self, cut: Cut, rank: int) -> dict[Rotary, int]:
        """Bytes of the tables of each way in which heads turn."""
        model, _ = self.layers(cut.tp, rank, cut.cp, cut.sequence_parallel, cut.ep)
        s = self.sizes(cut, rank)
        found = {x.rotary for _, x in walk(model.layers) if isinstance(x, AttentionHeads) and x.rotary}
        return {rotary: 2 * s.rows * (rotary.width // 2) * s.wide for rotary in found}

    def _passes(self, cut: Cut, rank: int, recompute: str) -> np.ndarray:
        """[layers, len(Of)] of a microbatch."""
        modes = [_mode(name, recompute) for name in self.names]
        made = {mode: self.rows(cut, rank, mode) for mode in dict.fromkeys(modes)}
        return np.array([made[mode][self.like[name]] for mode, name in zip(modes, self.names, strict=True)])

    def _totals(self, cut: Cut, recompute: str) -> np.ndarray:
        """[1, len(Of)]: all layers together, on the rank of tp with most of everything."""
        kinds = self.kinds_of_rank(cut.tp)
        return np.maximum.reduce([self.passes(cut, kind, recompute) for kind in kinds]).sum(axis=0, keepdims=True)

    def _kept(self, cut: Cut, rank: int, recompute: str) -> float:
        """Bytes that a microbatch's forward leaves in all layers of a rank of tp."""
        return float(self.passes(cut, rank, recompute)[:, Of.KEPT].sum())

    def _rows(self, cut: Cut, rank: int, mode: str) -> dict[str, np.ndarray]:
        """A row for each layer that differs; where some of it is computed again, for each block."""
        plain, again = self.layers(cut.tp, rank, cut.cp, cut.sequence_parallel, cut.ep)
        case = _Case(self.facts, self.machine, plain, cut, self.sizes(cut, rank))
        if mode == "none":
            return {name: case.row(name, layer) for name, layer in plain.layers.items()}
        once = {name: row for name, row in self.rows(cut, rank, "none").items() if is_block(name)}
        if mode == "full":
            return {name: case.all_again(row, plain.layers[name]) for name, row in once.items()}
        return {name: case.attention_again(row, plain.layers[name], again.layers[name]) for name, row in once.items()}

    def _weights(self, tp: int, rank: int, replicas: int, ep: int) -> np.ndarray:
        """[layers, len(Held)]; a tied table counts with each of its two layers. Experts have replicas / ep copies."""
        model, _ = self.layers(tp, rank, 1, False, ep)
        rows = {name: _held(list(layer.params().values()), replicas, ep) for name, layer in model.layers.items()}
        return np.array([rows[self.like[name]] for name in self.names])

    def _tied_weights(self, tp: int, rank: int, replicas: int, ep: int) -> dict[str, np.ndarray]:
        """[len(Held)] of each parameter that several layers share."""
        model, _ = self.layers(tp, rank, 1, False, ep)
        found = {}
        for first, (place, *_) in self.tied.items():
            name = self.names[place]
            param = model.layers[name].params()[first.removeprefix(f"{name}.")]
            found[first] = _held([param], replicas, ep)
        return found

    def counted_again(self, tp: int, rank: int, replicas: int, ep: int) -> np.ndarray:
        """[len(Held)]: what the sum of all layers' weights counts more than once."""
        rows = self.tied_weights(tp, rank, replicas, ep)
        again = [(len(self.tied[first]) - 1) * row for first, row in rows.items()]
        return np.sum(again, axis=0) if again else np.zeros(len(Held))


def _mode(name: str, recompute: str) -> str:
    """What of a layer is computed again: none, attention or full of it."""
    if not is_block(name):
        return "none"
    every = int(recompute.partition(":")[2] or 0)
    index = int(name.rpartition(".")[2])
    return recompute if not every else "none" if index % every else "full"


@dataclass(frozen=True, slots=True)
class _Case:
    """A microbatch on a rank."""

    facts: Facts
    machine: Machine
    model: LayeredModel
    cut: Cut
    sizes: Sizes

    @property
    def of(self) -> Sequences:
        """The sequences, as attention takes them."""
        return Sequences.on(self.machine, self.facts.seq_len)

    def row(self, name: str, layer: Layer) -> np.ndarray:
        """Of a layer as it is."""
        s, row = self.sizes, np.zeros(len(Of))
        work = work_of(layer, s, self.of)
        row[Of.KEPT], row[Of.PUT_OFF] = kept_of(layer, s), put_off(layer, s)
        if name == HEAD:
            loss, kept = self._loss()
            work, row[Of.KEPT] = work + loss, row[Of.KEPT] + kept
        parts = [self._seconds(part) for part in (work.forward, work.input_grad, work.weight_grad)]
        row[Of.FORWARD : Of.WEIGHT_GRAD + 1] = [part.total for part in parts]
        row[Of.PRODUCTS] = sum(part.products for part in parts)
        row[Of.EXPS], row[Of.STARTS] = sum(part.exps for part in parts), sum(part.starts for part in parts)
        row[Of.ATTENTION] = sum(part.attention for part in parts)
        row[Of.ADDED] = self._seconds(work.added).total
        waits = {
            axis: self._waits({name: layer} | ({"loss": self.model.loss} if name == HEAD else {}), axis)
            for axis in ("tp", "cp")
        }
        waits["ep"] = self._trips(layer)
        for axis, first in (("tp", Of.TP), ("cp", Of.CP), ("ep", Of.EP)):
            own = waits[axis]
            row[first : first + 3] = own.forward + own.backward, own.forward, own.hidden
        return row

    def all_again(self, once: np.ndarray, block: Layer) -> np.ndarray:
        """Of a block whose backward runs its whole forward again."""
        row = once.copy()
        row[Of.AGAIN] = once[Of.FORWARD]
        row[[Of.TP, Of.CP, Of.EP]] += once[[Of.TP_FORWARD, Of.CP_FORWARD, Of.EP_FORWARD]]
        return self._with_kept(row, Recompute(block))

    def attention_again(self, once: np.ndarray, block: Layer, held: Layer) -> np.ndarray:
        """Of a block whose backward runs its attention again; `held`: the block as it is wrapped for that."""
        row, attention = once.copy(), _attention_of(block)
        row[Of.AGAIN] = self._seconds(work_of(attention, self.sizes, self.of).forward).total
        for axis, column in (("tp", Of.TP), ("cp", Of.CP)):
            row[column] += self._waits({"": attention}, axis).forward
        return self._with_kept(row, held)

    def _with_kept(self, row: np.ndarray, held: Layer) -> np.ndarray:
        row[Of.KEPT], row[Of.KEPT_AGAIN] = kept_of(held, self.sizes), kept_again(held, self.sizes)
        return row

    def _loss(self) -> tuple[Both, int]:
        """Work and bytes of the loss, which stands behind the head, the cap of the logits included."""
        s, columns = self.sizes, self.model.loss.vocab.size
        is_capped = any(isinstance(layer, SoftCap) for layer in self.model.layers.values())
        kept = s.rows * (columns * s.wide + s.wide + INDEX_BYTES) + is_capped * s.rows * columns * s.item
        return loss_work(columns, s, is_capped=is_capped), kept

    def _seconds(self, work: Work) -> Seconds:
        return seconds_of(work, self.machine, self.facts.dtype)

    def _waits(self, layers: dict[str, Layer], axis: str) -> Waits:
        """Of all collectives inside along an axis."""
        sizes = {"tp": (self.cut.tp, 1), "cp": (self.cut.cp, self.cut.tp)}
        span, total = Span.of(*sizes[axis], self.machine.machine.ranks_per_node), Waits()
        if span.size == 1:
            return total
        for _, layer in walk(layers):
            if layer.sends():
                total += waits_of(layer, axis, span, self.sizes, self._behind(layer, span), self.machine)
        return total

    def _trips(self, layer: Layer) -> Waits:
        """Of the rows of all mixtures inside, to their experts and home."""
        span = Span.of(self.cut.ep, self.cut.cp * self.cut.tp, self.machine.machine.ranks_per_node)
        total = Waits()
        for _, inner in walk({"": layer}):
            if isinstance(inner, MixtureOfExperts) and span.size > 1:
                total += trips_of(inner, span, self.sizes, self._beside(inner), self.machine)
        return total

    def _beside(self, mixture: MixtureOfExperts) -> Beside:
        """What is done while rows travel."""
        down = self._seconds(down_work(mixture.experts, self.sizes)).products
        experts, shared = work_of(mixture.experts, self.sizes, self.of), Both()
        if mixture.shared is not None:
            shared = work_of(mixture.shared, self.sizes, self.of)
        own, of_all = (
            [self._seconds(part).total for part in (each.forward, each.input_grad, each.weight_grad)]
            for each in (experts, shared)
        )
        return Beside((of_all[0], of_all[1] + of_all[2]), (own[0], own[1]), down)

    def _behind(self, layer: Layer, span: Span) -> Behind:
        """The layer's own products, where any sum runs behind products."""
        if not self.machine.overlap(span.nodes):
            return Behind(0.0, 0.0)
        work = work_of(layer, self.sizes, self.of)
        forward = self._seconds(work.forward)
        return Behind(forward.products + forward.attention, self._seconds(work.weight_grad).products)


def _held(params: list[Param], replicas: int, ep: int) -> np.ndarray:
    """Bytes of some parameters, and of the rows that the first of so many replicas keeps of them."""
    row = np.zeros(len(Held))
    for param in params:
        count, rows = param.data.size, len(param.data)
        is_dealt = ep > 1 and "ep" not in data_axes(param.placement)
        copies = replicas // ep if is_dealt else replicas
        own = len(piece_of(rows, 0, copies)) * (count // max(rows, 1))
        item, wide = param.data.dtype.itemsize, param.grad_dtype.itemsize
        dealt = is_dealt * count
        row[: Held.LARGEST] += [count * item, count * wide, own * item, own * wide, 1, dealt * item, dealt * wide]
        row[Held.LARGEST] = max(row[Held.LARGEST], count * wide * (copies > 1))
    return row


def _attention_of(block: Layer) -> Layer:
    return next(layer for _, layer in walk({"": block}) if isinstance(layer, SelfAttention))


def _representatives(model: LayeredModel) -> dict[str, str]:
    """For each layer the first one that is made of the same: other kinds of blocks see less, or don't turn."""
    first: dict[object, str] = {}
    return {
        name: first.setdefault(_signature(layer) if is_block(name) else name, name)
        for name, layer in model.layers.items()
    }


def _signature(block: Layer) -> tuple[object, ...]:
    parts: list[object] = []
    for name, layer in walk({"": block}):
        parts += [name, type(layer), tuple(param.data.shape for param in layer.params().values())]
        if isinstance(layer, AttentionHeads):
            parts += [layer.sight, layer.rotary, layer.head_dim]
    return tuple(parts)
