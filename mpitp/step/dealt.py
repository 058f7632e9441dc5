"""Weights of which each replica keeps its rows alone (ZeRO-3), told: whole only while a layer runs.

    forward     W = the rows of all ranks      asked for behind the layer before, and forgotten behind this one
    backward    W once more; then dW = the sum over the ranks, of which each keeps its rows

What happens is `layers/gathered.py`; here it is only looked at, from outside: whose weights come, whose gradients go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpitp.comm.observed import Arrays, Call
from mpitp.layers.array_type import PARTIAL, REPLICATE, VARYING
from mpitp.layers.gathered import DealtParam, GatheredWeights
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.models.layered import LayeredModel
from mpitp.step.film import WEIGHTS, Telling
from mpitp.step.moves import GRADIENTS
from mpitp.step.picture import picture_of

if TYPE_CHECKING:
    from mpitp.step.record import Recorder

Named = Iterator[tuple[str, str, DealtParam]]  # a layer of the model itself, a parameter in it
DEALT = ("all_gather", "reduce_scatter")  # outside of layers, where weights are dealt
_PAIR = "all-gather of W's rows forward, reduce-scatter of dW backward"
_AHEAD = "asked for ahead, so that it moves while the layer before computes; forgotten when this layer is done"
_GATHER, _SCATTER = "mpitp.layers.gathered:GatheredWeights.forward", "mpitp.layers.gathered:GatheredWeights.backward"


@dataclass(slots=True)
class Dealing:
    """Whose rows are on their way. `beside`: bytes that a layer's weights take beside what its parameters hold now."""

    recorder: Recorder
    coming: Named = field(default_factory=lambda: iter(()))
    leaving: Named = field(default_factory=lambda: iter(()))
    beside: dict[str, int] = field(default_factory=dict)
    _rows: dict[str, int] = field(default_factory=dict)

    @property
    def is_on(self) -> bool:
        """Whether weights are dealt."""
        return bool(self._rows)

    def watch(self, model: LayeredModel) -> None:
        """See the gathers and scatters of each layer from now on."""
        for name, layer in model.layers.items():
            if isinstance(layer, GatheredWeights):
                self._watch(name, layer)

    def _watch(self, name: str, layer: GatheredWeights) -> None:
        named = zip(layer.params(), layer.dealt, strict=True)
        dealt = [(name, f"{name}.{inner}", each) for inner, each in named if each.group.size > 1]  # others are whole
        self._rows[name] = sum(each.param.data.nbytes for _, _, each in dealt)
        start, forward, backward = layer.start, layer.forward, layer.backward

        def started() -> None:
            self.coming = iter(dealt)
            start()

        def run(phase: str, ctx: Any, inner: Callable[[], Any]) -> Any:
            self.recorder.begin_early(name, phase, ctx)
            self.leaving = iter(dealt)
            return inner()

        vars(layer).update(
            start=started,
            forward=lambda x, *args: run(FORWARD, None, lambda: forward(x, *args)),
            backward=lambda dy, ctx: run(BACKWARD, ctx, lambda: backward(dy, ctx)),
        )

    def entered(self, name: str) -> None:
        """The layer runs: its parameters hold whole weights, and its rows are kept beside them."""
        if name in self._rows:
            self.beside[name] = self._rows[name]

    def left(self, name: str) -> None:
        """It is done, and its parameters are its rows again."""
        self.beside.pop(name, None)

    def tell(self, call: Call, arrays: Arrays, axis: str, run: Callable[[], Any]) -> Any:
        """A collective on the way of weights or of their gradients."""
        is_gather = call.op == "all_gather"
        layer, name, dealt = next(self.coming if is_gather else self.leaving)
        letters, own = self.recorder.letters, self.recorder.letters.of_param(dealt.param)
        before, after = (VARYING, REPLICATE) if is_gather else (PARTIAL, VARYING)
        names = ("W_rows", "W") if is_gather else ("dW_partial", "dW_rows")
        given = letters.shown(names[0], letters.changed(own, axis, before), picture_of(arrays[0]), "in")
        began, result = time.perf_counter(), run()
        made = letters.shown(names[1], letters.changed(own, axis, after), picture_of(result))
        if is_gather:
            self.beside[layer] = self.beside.get(layer, 0) + result.nbytes
        self.recorder.add(self._telling(name, call.op, axis), [given, made], began, arrays).axis = axis
        return result

    def _telling(self, name: str, kind: str, axis: str) -> Telling:
        phase, over = self.recorder.phase, axis.replace("+", " and ")
        if kind == "all_gather":
            told, subject, code = f"W = the rows of W of all ranks along {over}", WEIGHTS, _GATHER
            pair, note = (_PAIR, _AHEAD) if phase == FORWARD else ("", f"{_AHEAD}; forward has forgotten it")
        else:
            told, subject, code = f"dW_rows = own rows of sum over {over} of dW_partial", GRADIENTS, _SCATTER
            pair, note = _PAIR, "the whole dW is let go of: each rank keeps the rows that it updates"
        return Telling(name, phase, kind, told, note, pair, kind, subject, code)
