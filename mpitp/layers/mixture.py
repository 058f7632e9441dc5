r"""A mixture of experts in the place of an MLP: router, experts, and an expert that every token goes through.

    y = experts(x, scores, chosen)  [ + sigmoid(x g^T) shared(x) ],    scores, chosen = router(x)

The shared expert is an MLP like any other; its gate g [1, h] meets the rows between the cut products (Qwen2-MoE;
DeepSeekMoE: Dai et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import widened
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.experts import Experts, ExpertsContext, Meanwhile
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP, MlpContext
from mpitp.layers.param import Param
from mpitp.layers.passes import Pass
from mpitp.layers.product import ALL, DenseProduct
from mpitp.layers.router import Router, RouterContext


@dataclass(slots=True)
class SharedExpertContext:
    """The input, what the gate lets through [t, 1], and what the MLP has made [t, h]."""

    x: Array
    open: Array
    made: Array
    mlp: MlpContext


class SharedExpert(Layer):
    """y = sigmoid(x g^T) mlp(x). `gate`: g [1, h]."""

    algebra = Algebra(
        "shared expert",
        (Segment("y = sigmoid(x g^T) mlp", "x g mlp", "y", "every token goes through it; g lets more or less pass"),),
        (Segment("dx = mlp + dgate g, dg = dgate^T x", "dy g x mlp", "dx", "back from MLP and gate", grads=True),),
        names={"gate": "g"},
    )

    def __init__(self, gate: DenseProduct, mlp: MLP) -> None:
        self.gate, self.mlp = gate, mlp

    def forward(self, x: Array, run: Pass | None = None) -> tuple[Array, SharedExpertContext]:
        """x [t, h] -> y [t, h]."""
        made, mlp_ctx = self.mlp.forward(x, run)
        is_open = _sigmoid(widened(self.gate.forward(x))).astype(x.dtype, copy=False)  # [t, 1]
        return is_open * made, SharedExpertContext(x, is_open, made, mlp_ctx)

    def backward(self, dy: Array, ctx: SharedExpertContext) -> Array:
        """dy [t, h] -> dx [t, h]; sigmoid' = s (1 - s)."""
        is_open = ctx.open
        dopen = (widened(dy) * widened(ctx.made)).sum(axis=1, keepdims=True)
        dgate = (dopen * is_open * (1 - is_open)).astype(dy.dtype, copy=False)  # [t, 1]
        self.gate.accumulate_grads(dgate, ctx.x, [(ALL, ALL)])
        dx = self.mlp.backward(is_open * dy, ctx.mlp)
        dx += self.gate.input_grad(dgate)
        return dx

    def children(self) -> Mapping[str, Layer | Param]:
        return {"gate": self.gate.weight, "mlp": self.mlp}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows, each multiplied by a number of its own."""
        incoming.expect_summed("x of a gate")
        incoming.expect_gradient_summed("gate", self.gate.weight)
        made = self.mlp.placements(incoming)
        incoming.expect_like(made, "what is gated")
        return made


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow: exp of what isn't positive alone."""
    xp = array_module(x)
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e))


@dataclass(slots=True)
class MixtureContext:
    """The contexts of its layers."""

    router: RouterContext
    experts: ExpertsContext
    shared: SharedExpertContext | None


class MixtureOfExperts(Layer):
    """y = the chosen experts' scored sum, and the shared expert's where there is one."""

    algebra = Algebra(
        "mixture of experts",
        (Segment("y = experts + shared", "experts shared", "y", "row by row: no communication", needs="shared"),),
        (Segment("dx = the sum of these", "experts router shared", "dx", "x went to all of them"),),
    )

    def __init__(self, router: Router, experts: Experts, shared: SharedExpert | None = None) -> None:
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Array, run: Pass) -> tuple[Array, MixtureContext]:
        """x [t, h] -> y [t, h]. The shared expert runs while rows are on their way to the others."""
        scores, router_ctx = self.router.forward(x, run)
        if self.shared is None:
            y, experts_ctx = self.experts.forward(x, scores, router_ctx.choice.chosen)
            return y, MixtureContext(router_ctx, experts_ctx, None)
        of_all, beside = self.shared, Meanwhile(lambda: of_all.forward(x, run))
        y, experts_ctx = self.experts.forward(x, scores, router_ctx.choice.chosen, beside)
        shared, shared_ctx = beside.made
        shared += y
        return shared, MixtureContext(router_ctx, experts_ctx, shared_ctx)

    def backward(self, dy: Array, ctx: MixtureContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dscores = array_module(dy).empty(ctx.router.choice.scores.shape, dy.dtype)
        of_all, of_all_ctx = self.shared, ctx.shared
        if of_all is None or of_all_ctx is None:
            dx = self.experts.backward(dy, ctx.experts, dscores)
            dx += self.router.backward(dscores, ctx.router)
            return dx
        beside = Meanwhile(lambda: of_all.backward(dy, of_all_ctx))
        dx = self.experts.backward(dy, ctx.experts, dscores, beside)
        dx += self.router.backward(dscores, ctx.router)
        dx += beside.made
        return dx

    def children(self) -> Mapping[str, Layer]:
        named: dict[str, Layer] = {"router": self.router, "experts": self.experts}
        return named if self.shared is None else {**named, "shared": self.shared}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        self.router.placements(incoming)
        y = self.experts.placements(incoming)
        if self.shared is not None:
            y.expect_like(self.shared.placements(incoming), "the shared expert's branch")
        return y
