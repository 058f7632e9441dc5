r"""The experts of a mixture: MLPs of which each token goes through k, dealt over ep, their columns over tp.

    y_t = sum_j s_tj down_c(activation(gate_up_c x_t)),  c = c_tj      (Shazeer et al. 2017; Mixtral: Jiang et al. 2024)

A rank has its experts' columns: gate and up [e/ep, f/tp, h] each, fused in one array, and down [e/ep, h, f/tp].

    x, s, c   of all rows of this rank's tokens                          entry pairs: CopyToTP, or GatherFromSP
    rows      = x's copies, sorted by expert                             [k t, h]
    rows      go to their experts' ranks                                 exchange (`exchange.py`)
    ...       meanwhile: whatever else is to be done with x              the shared expert
    rows      = activation(rows gate_up_i^T) down_i^T                    a product an expert, no row for padding
    rows      come back, and are added with their scores                 y_partial [t, h]
    y         = sum over tp of y_partial                                 exit pair: ReduceFromTP, or ReduceScatterToSP

Scores multiply what the experts have made, of which a rank of tp has a summand: so ds is a summand too, and goes
through the conjugate of the pair that s came by, as dx does.

Nobody drops a token, unless there is a capacity: then an expert takes the first `capacity_of(...)` of a microbatch's
tokens, and what goes past it adds nothing (only the residual connection goes on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module, to_host
from mpitp.errors import PlacementError
from mpitp.layers.algebra import Algebra, Move, Segment, Sum
from mpitp.layers.array_type import PARTIAL, REPLICATE, ArrayType
from mpitp.layers.exchange import Exchange, Leg, Trip
from mpitp.layers.expert_matrices import ExpertMatrices
from mpitp.layers.layer import FORWARD, Layer, Send
from mpitp.layers.mappings import EntryPair, ExitPair
from mpitp.layers.mlp import ActivationContext
from mpitp.layers.param import Param
from mpitp.ops.routing import (
    Order,
    capacity_of,
    combine_backward,
    combine_forward,
    dispatch_backward,
    dispatch_forward,
    order_by_expert,
)


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """Where experts communicate: how x and the scores come in, how rows reach their experts, how y goes out."""

    entry: EntryPair
    scores: EntryPair
    exchange: Exchange
    exit: ExitPair


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """How many experts there are, how many a token goes to, and the capacity factor (0: as many rows as come).

    `shards`: over how many ranks of tp the rows between the cut products are cut.
    """

    num_experts: int
    top_k: int
    capacity: float = 0.0
    shards: int = 1


@dataclass(slots=True)
class LegContext:
    """What backward needs of the rows of one leg."""

    rows: Array  # [n, h] as the experts take them
    inner: ActivationContext  # [n, 2f/tp]
    act: Array  # [n, f/tp]


@dataclass(slots=True)
class ExpertsContext:
    """What backward needs."""

    order: Order
    trip: Trip
    scores: Array  # [t, k]
    legs: list[LegContext]
    made: Array  # [k t, h] as they have come back, summands along tp


class Meanwhile:
    """Work that is done while rows travel; `made`: what it gave."""

    def __init__(self, work: Callable[[], Any] = lambda: None) -> None:
        self._work = work
        self.made: Any = None

    def run(self) -> None:
        """Do it."""
        self.made = self._work()


class Experts(Layer):
    """y = the scored sum of a token's experts. `gate_up` [e/ep, 2f/tp, h], `down` [e/ep, h, f/tp]."""

    _make = "made = W_d f(W_gu rows), by each row's expert"
    _make_back = "drows = W_gu^T f'(W_d^T dmade), by each row's expert"
    algebra = Algebra(
        "experts",
        (
            Move(None, "counts", "counts = how many rows come from each rank for each own expert"),
            Move(
                Segment("rows_j = x of the token whose choice j is, sorted by expert", "x", "rows_sent"),
                "rows",
                "rows = those of all ranks for own experts",
                "each row goes to the rank that has its expert",
            ),
            Move(Segment(_make, "rows W_gu W_d", "made_there"), "made", "made = own rows, as they went"),
            Segment("y_partial = sum_j s_j made_j, made = W_d f(W_gu x)", "x made W_gu W_d", "y_partial"),
            Sum("y", "y = sum_r y_partial", "each rank has its columns of the experts"),
        ),
        (
            Move(Segment("dmade_j = s_j dy", "dy", "dmade_sent"), "dmade", "dmade = those of rows of own experts"),
            Move(Segment(_make_back, "dmade W_gu W_d", "drows_there"), "drows", "drows = own rows, as they went"),
            Segment("dx_partial = the sum of drows over a token's choices", "dy drows W_gu W_d", "dx_partial"),
            Sum("dx", "dx = sum_r dx_partial", "x was used on every rank"),
            Segment("ds_partial_j = dy . made_j", "dy", "ds_partial", "made is a summand, so ds is one too"),
            Sum("ds", "ds = sum_r ds_partial", "the router learns from all columns"),
            Segment("dW_d = dmade^T act, dW_gu = dinner^T rows", "dy x", "", "by each expert's own rows", grads=True),
        ),
        "all-to-all forward, all-to-all backward; scores go through the pair that x goes through",
        entry="entry",
        exit="exit",
        gathered=("s", "c"),
        names={"gate_up": "W_gu", "down": "W_d"},
    )

    def __init__(
        self,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        activation: Layer,
        pairs: ExpertPairs,
        sizes: ExpertSizes,
    ) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.pairs, self.sizes = pairs, sizes

    def forward(
        self, x: Array, scores: Array, chosen: np.ndarray, meanwhile: Meanwhile | None = None
    ) -> tuple[Array, ExpertsContext]:
        """x [t, h], scores and chosen [t, k] -> y [t, h]. `meanwhile` runs behind the rows' way there."""
        pairs, sizes = self.pairs, self.sizes
        x, scores, chosen = pairs.entry.forward(x), pairs.scores.forward(scores), pairs.scores.forward(chosen)
        capacity = capacity_of(sizes.capacity, len(x), sizes.top_k, sizes.num_experts)
        order = order_by_expert(chosen, sizes.num_experts, array_module(x), capacity)
        trip = pairs.exchange.plan(order.counts)
        coming = pairs.exchange.start_there(dispatch_forward(x, order), trip)
        (meanwhile or Meanwhile()).run()
        returning, legs = [], []
        for leg, rows in zip(trip.legs, coming, strict=True):
            made, ctx = self._leg_forward(rows.wait(), leg)
            returning.append(pairs.exchange.start_back(made, leg))
            legs.append(ctx)
        made = pairs.exchange.home(returning, trip)
        y_partial = combine_forward(made, scores, order)
        y = pairs.exit.forward([y_partial], like=y_partial)
        return y, ExpertsContext(order, trip, scores, legs, made)

    def backward(
        self, dy: Array, ctx: ExpertsContext, dscores: Array = None, meanwhile: Meanwhile | None = None
    ) -> Array:
        """dy [t, h] -> dx [t, h], and into `dscores` [t, k] the scores' gradient (None: nobody asks for it). The rows'
        way back runs behind the product for down's gradient, the sums behind that for gate's and up's.
        """
        pairs, trip = self.pairs, ctx.trip
        dmade, dscores_partial = combine_backward(pairs.exit.backward(dy), ctx.made, ctx.scores, ctx.order)
        coming = pairs.exchange.start_there(dmade, trip)
        (meanwhile or Meanwhile()).run()
        returning, douts, dinners = [], [], []
        for leg, rows, leg_ctx in zip(trip.legs, coming, ctx.legs, strict=True):
            dout = rows.wait()
            drows, dinner = self._leg_backward(dout, leg, leg_ctx)
            returning.append(pairs.exchange.start_back(drows, leg))
            douts.append(dout)
            dinners.append(dinner)
        counts = [leg.counts for leg in trip.legs]
        self.down.accumulate_grads(douts, [leg.act for leg in ctx.legs], counts)
        dx_partial = dispatch_backward(pairs.exchange.home(returning, trip), ctx.order)
        dx = pairs.entry.start_backward([dx_partial], like=dx_partial)
        pending = pairs.scores.start_backward([dscores_partial], like=dscores_partial)
        self.gate_up.accumulate_grads(dinners, [leg.rows for leg in ctx.legs], counts)
        summed = pending.wait()
        if dscores is not None:
            dscores[...] = summed
        return dx.wait()

    def _leg_forward(self, rows: Array, leg: Leg) -> tuple[Array, LegContext]:
        """What the leg's experts make of its rows [n, h]: summands along tp."""
        act, inner = self.activation.forward(self.gate_up.forward(rows, leg.experts, leg.counts))
        return self.down.forward(act, leg.experts, leg.counts), LegContext(rows, inner, act)

    def _leg_backward(self, dout: Array, leg: Leg, ctx: LegContext) -> tuple[Array, Array]:
        """drows [n, h], summands along tp, and dinner [n, 2f/tp] of dout [n, h]."""
        dact = self.down.input_grad(dout, leg.experts, leg.counts)
        dinner = self.activation.backward(dact, ctx.inner)
        return self.gate_up.input_grad(dinner, leg.experts, leg.counts), dinner

    @property
    def entry(self) -> EntryPair:
        """How x comes in."""
        return self.pairs.entry

    @property
    def exit(self) -> ExitPair:
        """How y goes out."""
        return self.pairs.exit

    def children(self) -> Mapping[str, Param]:
        return {**self.gate_up.params("gate_up"), **self.down.params("down")}

    def inside(self, ctx: ExpertsContext) -> Mapping[str, tuple[Array, str]]:
        """Where rows have gone: token, its expert, and the rank of ep that has it."""
        tokens = to_host(ctx.order.tokens)
        experts = np.repeat(np.arange(len(ctx.order.counts)), ctx.order.counts)
        ranks = self.pairs.exchange.ranks_of(experts)
        return {"token, expert, rank": (np.stack([tokens, experts, ranks], axis=1), REPLICATE)}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows, by way of this rank's columns of its experts, to whole rows."""
        incoming.expect_summed("x of experts")
        incoming.expect_columns((), "x of experts")
        x, scores = self.pairs.entry.placements(incoming), self.pairs.scores.placements(incoming)
        experts, columns, _ = self.gate_up.placement.parts[0].dims
        self._check_columns()
        for what, kind in (("x of experts", x), ("the scores of experts", scores)):
            cure = f"a copy along {columns.axis}, which sums its gradient, is missing"
            kind.expect(columns.axis, REPLICATE, what, cure)
        self.pairs.exchange.check(x, experts)
        for name, param in self.children().items():
            x.expect_gradient_summed(name, param)
        return self.pairs.exit.placements(x.changed(columns.axis, PARTIAL).of_layer("its own products"))

    def _check_columns(self) -> None:
        """What gate and up make, down must take."""
        gate, up, down = (*self.gate_up.placement.parts, *self.down.placement.parts)
        if gate.dims[:2] != up.dims[:2] or gate.dims[:2] != (down.dims[0], down.dims[2]):
            raise PlacementError("gate, up and down of experts must be cut alike: by experts and by columns")

    def sends(self) -> tuple[Send, ...]:
        """Those of its pairs. The rows that come in and go out may be a shard of those inside."""
        width, k, pairs = self.down.placement.parts[0].shape[1], self.sizes.top_k, self.pairs
        scores = pairs.scores.sends(k, 0)
        chosen = [replace(send, is_index=True) for send in scores if send.phase == FORWARD]
        outside = [*pairs.entry.sends(width, 0), *scores, *chosen, *pairs.exit.sends(width, 0)]
        inside = () if self.sizes.capacity else pairs.exchange.sends(width, k)
        shards = self.sizes.shards
        sends = [replace(s, width=s.width * shards) if s.op == "reduce_scatter" else s for s in outside]
        return (*sends, *(replace(s, width=s.width * shards) for s in inside))
