"""Weights that are dealt to the ranks of the data axes and whole only where they are used (ZeRO-3, FSDP: Rajbhandari et
al. 2020, Zhao et al. 2023).

    forward     gather W of this layer; start to gather the next layer's behind it; y = layer(x); keep only own rows
    backward    gather W again; start the layer's before; dx and dW; start dW's way to the ranks that keep its rows

Between uses a parameter is its rows alone, with their placement: it is loaded, updated, counted and saved like any
other. A rank that has no rows in a pass joins its collectives all the same (`idle_forward`, `idle_backward`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.group import Group, Pending
from mpitp.comm.mesh import Mesh
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer, Wrapper
from mpitp.layers.param import Param
from mpitp.layers.placement import Placement
from mpitp.layers.shards import Shard, data_axes, make_shards


@dataclass(slots=True, eq=False)
class DealtParam:
    """A parameter of which each rank of `group` keeps `rows[rank]`; `rest`: over whom the gradient is summed beside."""

    param: Param
    group: Group
    rows: tuple[range, ...]
    rest: Group
    whole: Placement  # where it is whole

    @classmethod
    def of(cls, shard: Shard, mesh: Mesh) -> DealtParam:
        """Make the parameter its own rows."""
        param = shard.param
        rest = mesh.along(*param.placement.partial - set(data_axes(param.placement)))
        mine, whole = shard.rows[shard.group.rank], param.placement
        param.data = param.data[mine.start : mine.stop].copy()
        param.placement = shard.piece.placement
        return cls(param, shard.group, shard.rows, rest, whole)

    def start_gather(self) -> Pending:
        """The whole array, on every rank."""
        return self.group.start_all_gather(self.param.data)

    def start_scatter(self, grad: Array | None) -> Pending:
        """The sum of the ranks' gradients, this rank's rows. None: this rank has none."""
        if grad is None:
            grad = array_module(self.param.data).zeros(self.whole_shape, self.param.grad_dtype)
        return self.group.start_reduce_scatter(grad, [len(rows) for rows in self.rows])

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the array that the rows of all ranks make."""
        return (sum(map(len, self.rows)), *self.param.data.shape[1:])

    def add(self, scattered: Array) -> None:
        """To the gradient of this rank's rows."""
        self.param.accumulate(self.rest.all_reduce(scattered))


@dataclass(slots=True)
class Scatters:
    """Gradients on their way: those of one layer at a time, so that no more are held whole."""

    under_way: list[tuple[DealtParam, Pending]] = field(default_factory=list)

    def start(self, grads: Sequence[tuple[DealtParam, Array | None]]) -> None:
        """Of the next layer, when those before have arrived."""
        self.finish()
        self.under_way = [(dealt, dealt.start_scatter(grad)) for dealt, grad in grads]

    def finish(self) -> None:
        """Wait for what is under way."""
        for dealt, pending in self.under_way:
            dealt.add(pending.wait())
        self.under_way = []


class GatheredWeights(Wrapper):
    """A layer whose weights are whole while it runs. `before`, `after`: its neighbours in forward order."""

    before: GatheredWeights | None = None
    after: GatheredWeights | None = None

    def __init__(self, inner: Layer, dealt: Sequence[DealtParam], scatters: Scatters) -> None:
        super().__init__(inner)
        self.dealt, self.scatters = dealt, scatters
        self._coming: list[Pending] = []

    def forward(self, x: Array, *args: Any, **kwargs: Any) -> tuple[Array, Any]:
        return self._with_weights(self.after, lambda: self.inner.forward(x, *args, **kwargs))

    def backward(self, dy: Array, ctx: Any) -> Array:
        kept = [dealt.param.grad for dealt in self.dealt]
        for dealt in self.dealt:
            dealt.param.grad = None
        dx = self._with_weights(self.before, lambda: self.inner.backward(dy, ctx))
        grads = [dealt.param.grad for dealt in self.dealt]
        for dealt, grad in zip(self.dealt, kept, strict=True):
            dealt.param.grad = grad
        self.scatters.start(list(zip(self.dealt, grads, strict=True)))
        return dx

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Those of what is inside while its weights are whole."""
        own = [dealt.param.placement for dealt in self.dealt]
        for dealt in self.dealt:
            dealt.param.placement = dealt.whole
        try:
            return self.inner.placements(incoming)
        finally:
            for dealt, placement in zip(self.dealt, own, strict=True):
                dealt.param.placement = placement

    def idle_forward(self) -> None:
        """The collectives of a forward pass."""
        self._with_weights(self.after, lambda: None)

    def idle_backward(self) -> None:
        """The collectives of a backward pass."""
        self._with_weights(self.before, lambda: None)
        self.scatters.start([(dealt, None) for dealt in self.dealt])

    def start(self) -> None:
        """Start to gather the weights, unless that is under way."""
        if not self._coming:
            self._coming = [dealt.start_gather() for dealt in self.dealt]

    def drop(self) -> None:
        """Forget what was gathered ahead: the weights change."""
        for pending in self._coming:
            pending.wait()
        self._coming = []

    def _with_weights(self, following: GatheredWeights | None, run: Callable[[], Any]) -> Any:
        self.start()
        rows = [dealt.param.data for dealt in self.dealt]
        whole, self._coming = [pending.wait() for pending in self._coming], []
        if following is not None:
            following.start()
        for dealt, weights in zip(self.dealt, whole, strict=True):
            dealt.param.data = weights
        try:
            return run()
        finally:
            for dealt, own in zip(self.dealt, rows, strict=True):
                dealt.param.data = own


def deal_weights(layers: dict[str, Layer], mesh: Mesh) -> None:
    """Keep this rank's rows alone of every parameter, and wrap the layers that have some. A collective."""
    params = {id(param): (f"{name}.{inner}", param) for name, layer in layers.items() for inner, param in _of(layer)}
    dealt = {id(shard.param): DealtParam.of(shard, mesh) for shard in make_shards(params.values(), mesh)}
    scatters = Scatters()
    for name, layer in layers.items():
        if own := [dealt[id(param)] for _, param in _of(layer)]:
            layers[name] = GatheredWeights(layer, own, scatters)
    wrapped = gathered_layers(layers)
    for before, after in zip(wrapped, wrapped[1:], strict=False):
        before.after, after.before = after, before


def gathered_layers(layers: dict[str, Layer]) -> list[GatheredWeights]:
    """The wrapped ones, in forward order."""
    return [layer for layer in layers.values() if isinstance(layer, GatheredWeights)]


@contextlib.contextmanager
def in_whole_shapes(layers: dict[str, Layer]) -> Iterator[None]:
    """Meanwhile weights have the shapes of whole ones, and no numbers: for layers that are asked what they would do."""
    params = {id(dealt.param): dealt for layer in gathered_layers(layers) for dealt in layer.dealt}
    kept = [(dealt.param, dealt.param.data) for dealt in params.values()]
    for dealt in params.values():
        xp = array_module(dealt.param.data)
        dealt.param.data = xp.broadcast_to(xp.zeros((), dealt.param.data.dtype), dealt.whole_shape)
    try:
        yield
    finally:
        for param, rows in kept:
            param.data = rows


def finish_scatters(layers: dict[str, Layer]) -> None:
    """Wait for the gradients that are on their way to the ranks that keep their rows; nothing where none are dealt."""
    for layer in gathered_layers(layers)[:1]:
        layer.scatters.finish()


def _of(layer: Layer) -> list[tuple[str, Param]]:
    return list(layer.params().items())
