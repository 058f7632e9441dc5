r"""The router of a mixture of experts: which experts each token goes to, and with what score.

    l = x Wr^T,   chosen, scores = the k largest of softmax(l)          x [t, h], Wr [e, h], scores [t, k]

A rank routes the rows that it has between the cut products: all of them, alike on all ranks of tp (I), or with sequence
parallelism its own (V); Wr is whole on every rank. So its gradient is equal on the ranks of tp, or a summand there,
which its placement says. What the auxiliary losses count is added up over the ranks whose rows are other tokens of the
same microbatch (`balance.py`); who leaves a rank out, or counts equal rows once a rank, is refused by the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.comm.group import Group
from mpitp.errors import PlacementError
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.balance import Balance
from mpitp.layers.layer import FORWARD, Layer, Send
from mpitp.layers.param import Param
from mpitp.layers.passes import Pass
from mpitp.layers.product import ALL, DenseProduct
from mpitp.ops.balance import tally_of
from mpitp.ops.routing import Choice, choose_experts, choose_experts_backward


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses: `top_k` experts, their scores `normed` to a sum of 1 or as they are; its `name`."""

    name: str
    top_k: int
    normed: bool


@dataclass(slots=True)
class RouterContext:
    """The input, what was chosen, and the pass's auxiliary losses (None: the model has none)."""

    x: Array
    choice: Choice
    balance: Balance | None


@dataclass(frozen=True, slots=True)
class TokenSum:
    """Adds up what ranks with other tokens of a microbatch have counted, over `axes`, along which `group` lies."""

    group: Group
    axes: tuple[str, ...]
    axis: str = "tp"  # one of them that has several ranks

    def check(self, rows: ArrayType) -> None:
        """Refuse a sum that leaves out ranks whose rows differ, or counts equal rows once a rank."""
        for axis in ("cp", "tp"):
            is_cut, is_summed = rows.along(axis) == VARYING, axis in self.axes
            if is_cut != is_summed:
                each = "each rank has other tokens" if is_cut else "all ranks have the same tokens"
                slip = "but nobody sums it" if is_cut else "but it is summed"
                raise PlacementError(
                    f"what the auxiliary losses count is wrong along {axis}: {each} there, {slip} over {axis}",
                    rows.made_by,
                    "sum it over Site.token_axes: it would change with the number of ranks",
                )


class Router(Layer):
    """Scores of the experts that each row goes to. `product`: Wr [e, h]."""

    algebra = Algebra(
        "router",
        (Segment("p = softmax(x W^T), c = the k largest of p, s = p_c", "x W", "s", "c: the experts of each token"),),
        (
            Segment(
                "dp_c = ds, dl = p (dp - sum_i p_i dp_i), dx = dl W, dW = dl^T x",
                "ds W x",
                "dx",
                "the choice has no gradient, the scores have; auxiliary losses come in here",
                grads=True,
            ),
        ),
        names={"y": "s", "dy": "ds"},
    )

    def __init__(self, product: DenseProduct, routing: Routing, token_sum: TokenSum) -> None:
        self.product, self.routing, self.token_sum = product, routing, token_sum

    def forward(self, x: Array, run: Pass) -> tuple[Array, RouterContext]:
        """x [t, h] -> scores [t, k]; which experts they are of stands in the context."""
        logits = self.product.forward(x)  # [t, e]
        choice = choose_experts(logits, self.routing.top_k, normed=self.routing.normed)
        if run.balance is not None:
            run.balance.tallies[self.routing.name] = self.token_sum.group.all_reduce(tally_of(choice))
        return choice.scores, RouterContext(x, choice, run.balance)

    def backward(self, dy: Array, ctx: RouterContext) -> Array:
        """dscores dy [t, k] -> dx [t, h]; the auxiliary losses' gradient comes in here."""
        dlogits = self._logits_grad(dy, ctx).astype(ctx.x.dtype, copy=False)  # [t, e]
        self.product.accumulate_grads(dlogits, ctx.x, [(ALL, ALL)])
        return self.product.input_grad(dlogits)

    def _logits_grad(self, dscores: Array, ctx: RouterContext) -> Array:
        choice, balance, normed = ctx.choice, ctx.balance, self.routing.normed
        if balance is None:
            return choose_experts_backward(dscores, choice, normed=normed)
        more = from_host(balance.probs_gradient().astype(choice.probs.dtype), array_module(dscores))
        dlogits = choose_experts_backward(dscores, choice, normed=normed, more=more)
        dlogits += balance.logits_gradient() * choice.log_sums[:, None] * choice.probs
        return dlogits

    def children(self) -> Mapping[str, Param]:
        return self.product.params()

    def inside(self, ctx: RouterContext) -> Mapping[str, tuple[Array, str]]:
        """The probabilities, and the experts that each row goes to."""
        return {"p": (ctx.choice.probs, VARYING), "c": (ctx.choice.chosen, VARYING)}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to their scores, row by row."""
        incoming.expect_summed("x of a router")
        incoming.expect_columns((), "x of a router")
        incoming.expect_gradient_summed("weight", self.product.weight)
        self.token_sum.check(incoming)
        return incoming

    def sends(self) -> tuple[Send, ...]:
        """What is counted, 64 bits a number; nothing where no other rank has tokens of the same microbatch."""
        if self.token_sum.group.size == 1:
            return ()
        nbytes, axis = 8 * (2 * self.product.shape[0] + 2), self.token_sum.axis
        return (Send(FORWARD, "all_reduce sum", 0, "16 (e + 1)", axis, fixed_bytes=nbytes),)
