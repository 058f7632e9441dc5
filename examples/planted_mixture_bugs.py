"""Mistakes that people make with mixtures of experts, as those of `planted_layout_bugs.py`: three that public
frameworks have had, each in several forms.

- a router's gradient that nobody sums where its tokens, or what its scores multiply, are cut;
- an auxiliary loss whose strength changes with the ranks along tp or cp;
- scores applied before the experts, not behind them; and rows that come back to other tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

import mpitp.layers.build_mixture
import mpitp.models.mixture
from examples.planted_bugs import in_method, in_model, replaced
from examples.planted_layout_bugs import SP, LayoutFault, in_place_of
from mpitp.backend.arrays import Array
from mpitp.comm.group import Pending
from mpitp.comm.serial import SerialGroup
from mpitp.layers.array_type import ArrayType
from mpitp.layers.build import Builder
from mpitp.layers.exchange import ExchangeOverEp, Leg, StayHere, Trip
from mpitp.layers.experts import Experts
from mpitp.layers.mappings import CopyToTP
from mpitp.layers.router import Router, TokenSum
from mpitp.layers.shards import ranks_along
from mpitp.models import CausalLM
from mpitp.models.batch import Batch
from mpitp.ops.routing import order_by_expert

FIRST = "blocks.0.mlp"
MIXTRAL = {
    **{"model_type": "mixtral", "vocab_size": 53, "hidden_size": 12, "num_attention_heads": 6},
    **{"num_key_value_heads": 3, "head_dim": 4, "num_hidden_layers": 2, "intermediate_size": 7},
    **{"max_position_embeddings": 24},
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3},
}


# The router's gradient


def forget_that_routers_are_partial(original: Any) -> Any:
    """Each rank of tp routes tokens of its own, and the router's weight is declared like one that meets all."""

    def mixture(build: Builder, sizes: Any, routing: Any) -> Any:
        made = original(build, sizes, routing)
        weight = made.router.product.weight
        weight.placement = replace(weight.placement, partial=weight.placement.partial - {"tp"})
        return made

    return mixture


class KeepOwnScores(CopyToTP):
    """Backward keeps this rank's summand of the scores' gradient."""

    def start_backward(self, dx_partials: Any, like: Array) -> Pending:
        return Pending.done(dx_partials[0])


def forget_sum_of_dscores(model: CausalLM) -> None:
    layer: Experts = model["blocks.1.mlp.experts"]
    layer.pairs = replace(layer.pairs, scores=KeepOwnScores(model.site.summation()))


class UncopiedScores(CopyToTP):
    """Scores are taken as they are, without the copy that sums their gradient."""

    def placements(self, incoming: ArrayType) -> ArrayType:
        return incoming


def take_scores_uncopied(original: Any) -> Any:
    def pairs(entry: Any, scores: Any, exchange: Any, exit: Any) -> Any:  # noqa: A002
        return original(entry, UncopiedScores(scores.summation), exchange, exit)

    return pairs


# The auxiliary losses


def count_equal_tokens_once_a_rank(original: Any) -> Any:
    """All ranks of tp have the same tokens, and what each has counted is added up."""
    return lambda site: TokenSum(ranks_along(site.mesh, ["tp"]), ("tp",))


def leave_other_tokens_out(original: Any) -> Any:
    """Each rank of cp counts the tokens of its own alone."""
    return lambda site: TokenSum(ranks_along(site.mesh, ()), ())


def count_own_tokens(original: Any, router: Router, x: Array, run: Any) -> Any:
    """What a rank has counted isn't added to what others have, whatever the types were told."""
    token_sum = router.token_sum
    router.token_sum = replace(token_sum, group=SerialGroup())
    try:
        return original(router, x, run)
    finally:
        router.token_sum = token_sum


def weigh_by_own_targets(original: Any) -> Any:
    """The auxiliary losses' gradient weighs as much as this rank's targets, which are a part of the microbatch's."""
    return property(lambda batch: batch.num_targets)


def in_batches() -> AbstractContextManager[None]:
    return replaced(Batch, "whole_targets", weigh_by_own_targets)


# Scores and rows


class WeighingFirst(StayHere):
    """What goes into the experts has been multiplied by the scores."""

    factors: Array

    def start_there(self, rows: Array, trip: Trip) -> list[Pending]:
        return [Pending.done(rows * self.factors)]


def weigh_what_goes_in(original: Any, layer: Experts, x: Array, scores: Array, chosen: np.ndarray, *rest: Any) -> Any:
    pairs, first = layer.pairs, WeighingFirst()
    order = order_by_expert(chosen, layer.sizes.num_experts, np)
    object.__setattr__(first, "factors", scores.reshape(-1)[order.assignments][:, None])
    layer.pairs = replace(pairs, exchange=first)
    try:
        return original(layer, x, np.ones_like(scores), chosen, *rest)
    finally:
        layer.pairs = pairs


def group_of_experts(layer: Experts) -> Any:
    entry: Any = layer.pairs.entry
    return entry.summation.group


def come_back_in_the_order_of_arrival(original: Any, exchange: ExchangeOverEp, rows: Array, leg: Leg) -> Pending:
    """Rows go home as the experts have them, sorted by expert, and not sorted by where they came from."""
    return original(exchange, rows, replace(leg, by_source=np.arange(len(rows))))


def keep_all_rows(original: Any) -> Any:
    """Experts are dealt over ep, and nobody exchanges rows."""
    return lambda site, count: StayHere()


MIXTURE_FAULTS: dict[str, LayoutFault] = {
    "router not partial under token shards": LayoutFault(
        "a router meets its rank's tokens alone; nobody sums its gradient",
        in_place_of(mpitp.layers.build_mixture, "build_mixture", forget_that_routers_are_partial),
        {"types": f"{FIRST}.router"},
        "tp",
        {"tp": 2},
        SP,
    ),
    "scores not copied": LayoutFault(
        "scores multiply each rank's summands, and no pair sums their gradient",
        in_place_of(mpitp.layers.build_mixture, "ExpertPairs", take_scores_uncopied),
        {"types": f"{FIRST}.experts"},
        "tp",
        {"tp": 2},
    ),
    "gradient of scores not summed": LayoutFault(
        "a rank's router learns from the rank's own summands of what experts make",
        in_model(forget_sum_of_dscores),
        {"dx": "blocks.1.mlp.router"},
        "tp",
        {"tp": 3},
    ),
    "equal tokens counted once a rank": LayoutFault(
        "the auxiliary losses count the same tokens on every rank of tp",
        in_place_of(mpitp.layers.build_mixture, "_token_sum", count_equal_tokens_once_a_rank),
        {"types": f"{FIRST}.router"},
        "tp",
        {"tp": 2},
    ),
    "other ranks' tokens not counted": LayoutFault(
        "the auxiliary losses count a rank's own tokens alone",
        in_place_of(mpitp.layers.build_mixture, "_token_sum", leave_other_tokens_out),
        {"types": f"{FIRST}.router"},
        "cp",
        {"cp": 2, "tp": 1},
    ),
    "auxiliary losses of a rank's own tokens": LayoutFault(
        "the auxiliary losses are of a rank's own tokens, a part of the microbatch",
        in_method(Router, "forward", lambda router: router.token_sum.group, count_own_tokens),
        {"dx": "blocks.1.mlp.router", "value": "loss"},
        mesh={"cp": 2, "tp": 1},
    ),
    "auxiliary losses weaker with cp": LayoutFault(
        "the auxiliary losses' gradient weighs as much as the rank's own targets",
        in_batches,
        {"dx": "blocks.1.mlp.router"},
        mesh={"cp": 2, "tp": 1},
    ),
    "scores before the experts": LayoutFault(
        "scores multiply what goes into the experts, not what comes out",
        in_method(Experts, "forward", group_of_experts, weigh_what_goes_in),
        {"y": f"{FIRST}.experts"},
        mesh={"tp": 2},
    ),
    "rows back to other tokens": LayoutFault(
        "experts' rows come back in another order than they went",
        in_method(ExchangeOverEp, "start_back", lambda exchange: exchange.group, come_back_in_the_order_of_arrival),
        {"y": f"{FIRST}.experts"},
        mesh={"ep": 2, "tp": 1},
    ),
    "experts dealt, rows not exchanged": LayoutFault(
        "experts are dealt to the ranks of ep, and rows stay where they are",
        in_place_of(mpitp.layers.build_mixture, "_exchange", keep_all_rows),
        {"types": f"{FIRST}.experts"},
        "ep",
        {"ep": 2, "tp": 1},
    ),
}
MIXTURE_FAULTS = {name: replace(fault, model="mixtral") for name, fault in MIXTURE_FAULTS.items()}
