r"""Bytes that every rank of a run holds at the height of a step, by formula; nothing is allocated.

P elements of parameters on a rank (of its stage, cut by tp), D ranks along the axes of data, s bytes an element, w
bytes of one in which is summed (4 for the 16-bit floats, else s):

| what              | plain          | ZeRO-1       | ZeRO-2       | ZeRO-3                                  |
|-------------------|----------------|--------------|--------------|-----------------------------------------|
| weights           | P s            | P s          | P s          | P s / D                                 |
| gradients         | P w            | P w          | P w / D      | P w / D                                 |
| optimizer         | 2 P w          | 2 P w / D    | 2 P w / D    | 2 P w / D; with 16-bit floats 3 for 2   |
| buffers of data   | largest bucket | P w / D      | P w          | two layers' weights, two layers' grads  |

The optimizer's are AdamW's two moments, and a master of each weight where weights have 16 bits. / D goes by rows: ranks
differ by a row. Activations: what `kept.py` says of a microbatch, for each one that the schedule holds at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpitp.backend.precision import is_half
from mpitp.comm.mesh import AXES, Mesh
from mpitp.layers.layer import Layer
from mpitp.layers.logits_bias import LogitsBias
from mpitp.layers.param import Param
from mpitp.layers.partition import piece_of
from mpitp.layers.rows import Rows
from mpitp.layers.shards import data_axes
from mpitp.models.layered import LayeredModel
from mpitp.pipeline.actions import Action, Kind
from mpitp.plan.kept import Sizes, kept_again, kept_of_chunk, put_off_of_chunk


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does beside its model: the rows of a microbatch, ZeRO's level, the largest bucket, and this stage's
    list of actions (empty: one microbatch after the other).
    """

    rows: Rows
    zero: int = 0
    bucket_bytes: int = 4 << 20
    actions: Sequence[Action] = ()


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank; `in_flight`: passes through a chunk whose activations are held at the height, `recomputed`:
    contexts of the one layer that backward is computing again.
    """

    coordinates: dict[str, int]
    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    buffers: int
    in_flight: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.recomputed + self.buffers

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"total": self.total}


def memory_of(model: LayeredModel, plan: StepPlan, mesh: Mesh) -> RankMemory:
    """Of the rank at `mesh`'s place; `model` (possibly abstract) may be that of any of its replicas."""
    params = [param for _, param in model.named_params()]
    whole, own = _bytes(params, None), _bytes(params, mesh)
    weights, grads, states = (own if plan.zero >= level else whole for level in (3, 2, 1))
    constants = [p for layer in model.layers.values() if isinstance(layer, LogitsBias) for p in _params_of(layer)]
    untrained = _bytes(() if plan.zero else constants, None)  # ZeRO has a piece of a gradient for each parameter
    masters = states.wide if is_half(model.dtype) else 0
    sizes = Sizes.of(plan.rows, model.site, model.config.hidden_size)
    activations, in_flight = _activations(model, plan, sizes)
    again = max((kept_again(layer, sizes) for layer in model.layers.values()), default=0)
    return RankMemory(
        {axis: mesh.coordinates[axis] for axis in AXES if mesh.sizes[axis] > 1},
        weights.stored,
        grads.wide - untrained.wide,
        2 * states.wide + masters,
        activations,
        again,
        _buffers(model, plan, whole, own),
        in_flight,
    )


def share_of_rows(model: LayeredModel, mesh: Mesh) -> frozenset[tuple[tuple[str, ...], int, int]]:
    """Of parameters dealt by rows over the axes of data: the axes, rows, and how many of these are this rank's."""
    found = {(data_axes(param.placement), len(param.data)) for _, param in model.named_params()}
    return frozenset((axes, rows, len(_own_rows(axes, rows, mesh))) for axes, rows in found)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Of some parameters: as they are stored, and as they are summed."""

    stored: int
    wide: int


def _bytes(params: Iterable[Param], mesh: Mesh | None) -> _Bytes:
    """Of whole parameters; with a mesh, of the rows that this rank of the axes of data keeps."""
    stored = wide = 0
    for param in params:
        count = param.data.size if mesh is None else _own_elements(param, mesh)
        stored += count * param.data.dtype.itemsize
        wide += count * param.grad_dtype.itemsize
    return _Bytes(stored, wide)


def _own_elements(param: Param, mesh: Mesh) -> int:
    rows = len(param.data)
    return len(_own_rows(data_axes(param.placement), rows, mesh)) * (param.data.size // max(rows, 1))


def _own_rows(axes: tuple[str, ...], rows: int, mesh: Mesh) -> range:
    group = mesh.along(*axes)
    return piece_of(rows, group.rank, group.size)


def _activations(model: LayeredModel, plan: StepPlan, sizes: Sizes) -> tuple[int, int]:
    """Most bytes held at a time, and of how many passes through a chunk.

    A backward lets go of a pass, or of all but what its weight gradients need where these are put off: to a
    WEIGHT_GRAD, or in the invariant mode to the end of the step.
    """
    kept = [kept_of_chunk(model, chunk, sizes) for chunk in model.chunks]
    if not plan.actions:
        return sum(kept), 1
    left = [put_off_of_chunk(model, chunk, sizes) for chunk in model.chunks]
    held, most = [0, 0], (0, 0)
    for action in plan.actions:
        full, rest = kept[action.chunk], left[action.chunk]
        is_put_off = action.kind is Kind.INPUT_GRAD or (action.kind is Kind.BACKWARD and model.site.num_blocks)
        changes = {Kind.FORWARD: (full, 1), Kind.WEIGHT_GRAD: (-rest, -1)}
        change = changes.get(action.kind, (rest - full, 0) if is_put_off else (-full, -1))
        held = [now + by for now, by in zip(held, change, strict=True)]
        most = max(most, (held[0], held[1]))
    return most


def _buffers(model: LayeredModel, plan: StepPlan, whole: _Bytes, own: _Bytes) -> int:
    """What is on its way between the ranks of the axes of data at the height of backward."""
    params = [param for _, param in model.named_params() if data_axes(param.placement)]
    groups = [model.site.mesh.along(*data_axes(param.placement)).size for param in params]
    if max(groups, default=1) == 1:
        return 0
    if plan.zero == 3:
        return _most_of_two([_bytes(_params_of(layer), None) for layer in model.layers.values()])
    if model.site.num_blocks:  # the sum so far, beside a microbatch's own
        return whole.wide
    largest = max(param.data.size * param.grad_dtype.itemsize for param in params)
    return {0: max(largest, min(plan.bucket_bytes, whole.wide)), 1: own.wide, 2: whole.wide}[plan.zero]


def _params_of(layer: Layer) -> list[Param]:
    return list(layer.params().values())


def _most_of_two(layers: Sequence[_Bytes]) -> int:
    """Weights of a layer and of the next one, which is gathered behind it; and as much of gradients."""
    pairs = zip(layers, [*layers[1:], _Bytes(0, 0)], strict=True)
    return max(one.stored + other.stored + one.wide + other.wide for one, other in pairs)
