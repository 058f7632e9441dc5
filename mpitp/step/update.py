"""The end of a training step, told like the rest of a pass: gradients that are still partial, the norm, clipping, and
the optimizer's update of every parameter.

The work is that of `optim/`: the same sums, the same norm, the same AdamW; here it is only looked at.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.observed import Arrays, Call
from mpitp.layers.array_type import INVARIANT, PARTIAL, REPLICATE, VARYING, ArrayType
from mpitp.layers.param import Param
from mpitp.layers.shards import data_axes
from mpitp.models.layered import LayeredModel
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.grad_norm import GradNorm, clip_scale
from mpitp.optim.reduction import Reduction
from mpitp.step.contents import joined
from mpitp.step.film import UPDATE, WEIGHTS, Shown, Telling
from mpitp.step.picture import picture_of

if TYPE_CHECKING:
    from mpitp.step.record import Recorder

CLIP_NORM, LR = 1.0, 0.01
NORM, CLIP, ADAMW = "gradient norm", "clipping", "AdamW"
_CODE = {
    NORM: "mpitp.optim.grad_norm:GradNorm.__call__",
    CLIP: "mpitp.optim.grad_norm:clip_scale",
    ADAMW: "mpitp.ops.adamw:adamw_reference",
    WEIGHTS: "mpitp.optim.buckets:spread_weights",
}
_BUCKET = "a bucket: the rows of several parameters, one after the other"
_SQUARES = "squares_partial = sum of g^2 of each block that rank r owns, else 0"
_CLIP = f"norm = sqrt(sum squares), c = min(1, {CLIP_NORM:g} / norm)"
_UPDATE = "m = (1 - b1) c g, v = (1 - b2) (c g)^2, W_new = W - lr (m' / (sqrt(v') + eps) + wd W)"


@dataclass(slots=True)
class Update:
    """The operations after backward on one rank."""

    recorder: Recorder
    model: LayeredModel
    reduction: Reduction
    squares: list[Shown] = field(default_factory=list)

    def run(self) -> None:
        """Sum, measure, clip, update. A collective."""
        self.recorder.is_open = True  # sums of gradients that are still partial
        self.reduction.finish()
        self.recorder.is_open = False
        norm = GradNorm(self.reduction.counted, self.model.site.ranks)
        self.recorder.outside = self._saw_squares
        scale = self._clip(norm())
        self.recorder.outside = None
        for name, param in self.reduction.params:
            if param.grad is not None:
                self._step(name, param, scale)
        self.recorder.outside = self._saw_weights
        self.reduction.updated()
        self.recorder.outside = None

    def _saw_squares(self, call: Call, arrays: Arrays, result: Any, began: float, axis: str) -> None:
        """The one sum of the norm, over all ranks of all stages."""
        given, made = self._shown("squares_partial", PARTIAL, arrays[0]), self._shown("squares", INVARIANT, result)
        note = "a slot for each block of each tensor: one rank fills it, so that nothing is counted twice"
        self.recorder.add(_telling(NORM, "update.norm", _SQUARES, note), [given], began)
        told = _telling(NORM, "update.norm", "squares = sum_r squares_partial", "", f"{call.op} {call.detail}")
        self.recorder.add(told, [replace(given, role="in"), made], began, arrays).axis = axis
        self.squares = [replace(made, role="in")]

    def _saw_weights(self, call: Call, arrays: Arrays, result: Any, began: float, axis: str) -> None:
        """With ZeRO each rank has updated its rows of the weights, and gets the others'."""
        moves, letters = self.recorder.moves, self.recorder.letters
        assert moves is not None
        given, made = (
            letters.shown(name, letters.changed(moves.whole, axis, letter), picture_of(joined(array)), role)
            for name, letter, array, role in (("W_rows", VARYING, arrays, "in"), ("W", REPLICATE, result, "out"))
        )
        told = _telling(WEIGHTS, "update.weights", "W = the rows of W_new of all ranks", _BUCKET, call.op)
        self.recorder.add(told, [given, made], began, arrays).axis = axis

    def _clip(self, norm: float) -> float:
        began, scale = time.perf_counter(), clip_scale(norm, CLIP_NORM)
        made = [self._shown(name, INVARIANT, np.array([x])) for name, x in (("norm", norm), ("c", scale))]
        note = "every rank has the same norm and takes the same branch"
        self.recorder.add(_telling(CLIP, "update.clip", _CLIP, note), [*self.squares, *made], began)
        return scale

    def _step(self, name: str, param: Param, scale: float) -> None:
        """One parameter by AdamW. Its moments are as large as it is and stay on its rank."""
        letters = self.recorder.letters
        kind, before, grad = self._kind_of(param), picture_of(param.data), picture_of(param.grad)
        began, optimizer = time.perf_counter(), AdamW([(name, param)], AdamWSettings())
        optimizer.step(LR, scale)
        moments = optimizer.moments[name]
        self.recorder.moments += _nbytes(moments)
        arrays = [letters.shown("W", kind, before, "param"), letters.shown("g", kind, grad, "in")]
        arrays += [letters.shown(each, kind, picture_of(x), "mid") for each, x in zip("mv", moments, strict=True)]
        arrays.append(letters.shown("W_new", kind, picture_of(param.data)))
        decay = "" if param.decay else ", without decay"
        note = f"element by element: each rank its own piece, nothing is sent{decay}"
        self.recorder.add(_telling(ADAMW, f"update.{name}", _UPDATE, note), arrays, began)

    def _kind_of(self, param: Param) -> ArrayType:
        """With ZeRO what replicas hold alike is dealt to them by rows."""
        letters, kind = self.recorder.letters, self.recorder.letters.of_param(param)
        axes = [axis for axis in data_axes(param.placement) if axis in letters.axes] if self.recorder.is_dealt else []
        return letters.changed(kind, "+".join(axes), VARYING) if axes else kind

    def _shown(self, name: str, letter: str, array: Array) -> Shown:
        """An array that is the same kind of thing along every axis."""
        letters = self.recorder.letters
        return letters.shown(name, ArrayType(tuple((axis, letter) for axis in letters.axes)), picture_of(array))


def _telling(subject: str, place: str, equation: str, note: str, collective: str = "") -> Telling:
    return Telling(place, UPDATE, collective or subject, equation, note, "", collective, subject, _CODE[subject])


def _nbytes(arrays: Iterable[Array]) -> int:
    return sum(array.nbytes for array in arrays)
