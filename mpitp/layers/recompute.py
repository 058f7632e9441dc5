"""Memory for time: a layer whose context is its input alone, from which backward computes the rest again.

    forward     y = layer(x), and its context is dropped
    backward    layer.forward(x) again, then layer.backward(dy)

(Chen et al. 2016; Korthikanti et al. 2022 for attention alone.) Forward is a function of x and the pass, dropout masks
included, so the numbers are those without it, to the last bit. Its collectives run once more too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.layers.attention import SelfAttention
from mpitp.layers.layer import Layer, Wrapper
from mpitp.layers.passes import Pass


@dataclass(slots=True)
class RecomputeContext:
    """What forward was given."""

    x: Array
    run: Pass


class Recompute(Wrapper):
    """Keeps what `inner` is given, and nothing of what it makes."""

    def forward(self, x: Array, run: Pass) -> tuple[Array, RecomputeContext]:
        """As the layer's own; x must stay as it is."""
        y, _ = self.inner.forward(x, run)
        return y, RecomputeContext(x, run)

    def backward(self, dy: Array, ctx: RecomputeContext) -> Array:
        """As the layer's own, behind another forward."""
        _, inner_ctx = self.inner.forward(ctx.x, ctx.run)
        return self.inner.backward(dy, inner_ctx)


def recomputing(wish: str) -> Callable[[int, Layer], Layer]:
    """What makes of block `index` one that recomputes as a run file wishes: "none", "attention" (what lies between the
    block's projections and at them), "full", or "every:N" (the whole of blocks 0, N, 2 N, ...).
    """
    if wish == "attention":
        return lambda index, block: _with_attention_again(block)
    step = {"none": 0, "full": 1}.get(wish) or int(wish.partition(":")[2] or 0)
    return lambda index, block: Recompute(block) if step and index % step == 0 else block


def _with_attention_again(block: Layer) -> Layer:
    """The block, its attention wrapped where it stands."""
    for name, part in vars(block).items():
        if isinstance(part, SelfAttention):
            inner: Any = Recompute(part)
            setattr(block, name, inner)
            return block
    raise AssertionError(f"a {type(block).__name__} has no attention of its own")
