"""Runs a model in the layout at hand and in the one-rank oracle, with the same weights and batch, and compares them.

Rank 0 runs the oracle; it needs the whole model in memory beside its own share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.comm.mesh import AXES, Mesh
from mpitp.layers.layer import walk
from mpitp.layers.logits_bias import LogitsBias
from mpitp.layers.param import Param
from mpitp.layers.rows import Rows
from mpitp.layers.site import Site
from mpitp.models.batch import Batch
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.layered import LayeredModel
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.deal import Deal
from mpitp.train.step import TrainStep
from mpitp.verify.compare import Comparison, Tolerance, compare
from mpitp.verify.not_finite import refusal_of, refuse_weights
from mpitp.verify.record import Log, record_layers, record_params, record_updates

MakeModel = Callable[[Site], LayeredModel]
MakeStep = Callable[
    [LayeredModel, AdamWSettings, float], TrainStep
]  # of a model, with these settings and clipping norm


def plain_step(model: LayeredModel, settings: AdamWSettings, clip_norm: float) -> TrainStep:
    """One microbatch after the other, every rank updates all that it holds."""
    return TrainStep(model, AdamW(model.named_params(), settings, model.dtype), clip_norm)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run: `steps` optimizer steps at rate `lr` after the forward and backward pass, and the tolerance.

    AdamW divides a gradient by its own size: where the true one is 0 (a key's bias shifts all scores of a row alike), a
    small `eps` would blow rounding up to a whole step. This one damps what is far below the clipped gradients' size.
    """

    tolerance: Tolerance
    steps: int = 0
    lr: float = 1e-3
    clip_norm: float = 1.0
    eps: float = 1e-3


@dataclass(slots=True)
class Report:
    """Everything that was compared, in the order in which it was computed. `oracle`: what with."""

    rows: list[Comparison] = field(default_factory=list)
    oracle: str = "the one-rank model"

    @property
    def ok(self) -> bool:
        """Whether all is equal within the tolerance."""
        return all(row.ok for row in self.rows)

    def first(self, kind: str) -> Comparison | None:
        """The first failure among the rows of a kind; for "dx" in backward's own order, from the loss down."""
        return next((row for row in self.rows if row.kind == kind and not row.ok), None)


def verify(
    site: Site,
    make_model: MakeModel,
    batches: Batch | Sequence[Batch],
    settings: Settings,
    make_step: MakeStep = plain_step,
) -> Report:
    """Compare; the same report on all ranks. A collective.

    `batches`: the microbatches of one step, of all ranks together. `make_step`: how the layout trains.
    Raises NumericError when the weights, or what the one-rank model makes of them, are not finite.
    """
    group, model = site.ranks, make_model(site)
    batches = [batches] if isinstance(batches, Batch) else batches
    refuse_weights(model)
    own = _run(model, batches, settings, make_step)
    oracle = None
    if group.rank == 0:
        oracle = _run(make_model(site.on_one_rank()), batches, settings, plain_step).records
    refusal = group.broadcast_object(refusal_of(oracle) if oracle is not None else None)
    if refusal is not None:
        raise refusal
    rows = compare(group, own.records, oracle, settings.tolerance, places_of(site.mesh))
    return Report(group.broadcast_object(rows))


def places_of(mesh: Mesh) -> list[dict[str, int]]:
    """Every rank's place along each axis that has several ranks. A collective."""
    return mesh.world.all_gather_objects({axis: mesh.coordinates[axis] for axis in AXES if mesh.sizes[axis] > 1})


def _run(model: LayeredModel, batches: Sequence[Batch], settings: Settings, make_step: MakeStep) -> Log:
    """The weights, one forward and backward pass, all gradients and their norm, then the optimizer steps."""
    log = record_layers(model)
    log.whole = joined_rows(batches)
    log.source = joined_rows([batch.source for batch in batches if batch.source is not None])
    record_params(model.named_params(), log, "start")
    step, dealt = make_step(model, AdamWSettings(eps=settings.eps), settings.clip_norm), deal(model.site, batches)
    loss, _ = step.accumulate(dealt)
    record_params(step.reduction.counted, log, "grad")
    log.add("loss", "value", np.array(loss))
    log.add("gradient norm", "value", np.array(step.grad_norm()))
    if settings.steps:
        _run_steps(step, dealt, settings, log)
    return log


def joined_rows(batches: Sequence[Batch]) -> Rows:
    """The rows of several batches, one after the other."""
    return Rows(tuple(run for batch in batches for run in batch.rows.runs))


def deal(site: Site, batches: Sequence[Batch]) -> list[Batch]:
    """This rank's part of a step's microbatches."""
    mine = Deal.on(site.mesh, in_turn=bool(site.num_blocks))
    return [batches[number].cut(*mine.piece) for number in mine.of(len(batches))]


def _run_steps(step: TrainStep, batches: Sequence[Batch], settings: Settings, log: Log) -> None:
    """Optimizer steps, recorded by their losses, norms and what they have changed the weights by."""
    log.is_open = False
    results = [step(batches, settings.lr) for _ in range(settings.steps)]
    log.is_open = True
    for number, result in enumerate(results, start=1):
        log.add(f"loss of step {number}", "value", np.array(result.loss))
        log.add(f"gradient norm of step {number}", "value", np.array(result.grad_norm))
    record_updates(step.model, log)


@dataclass(frozen=True, slots=True)
class FiniteDifference:
    """One parameter element: the hand-written gradient beside (loss(w + e) - loss(w - e)) / 2e."""

    name: str
    index: tuple[int, ...]  # in the rank's local array
    gradient: float
    difference: float

    @property
    def ok(self) -> bool:
        """Equal to what central differences can tell in float64."""
        return abs(self.gradient - self.difference) <= 1e-6 * max(abs(self.gradient), abs(self.difference), 1e-3)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "index": self.index, "gradient": self.gradient, "difference": self.difference}


def finite_differences(
    model: LayeredModel,
    batches: Batch | Sequence[Batch],
    count: int,
    seed: int = 0,
    make_step: MakeStep = plain_step,
) -> list[FiniteDifference]:
    """Check `count` randomly chosen parameter elements of a float64 model. A collective, equal on all ranks.

    Each element is one of some rank's own; where it is replicated, every rank changes its replica too, because replicas
    are one element of the model.
    """
    assert model.dtype == np.float64, "central differences drown in float32's rounding"
    batches = [batches] if isinstance(batches, Batch) else batches
    step, dealt = make_step(model, AdamWSettings(), 0.0), deal(model.site, batches)
    step.accumulate(dealt)
    gradients = dict(step.reduction.counted)
    params = _everyones_parts(model)
    tokens = _looked_up(model, batches)
    random = np.random.default_rng(seed)
    chosen = []
    for _ in range(count):
        name = list(params)[int(random.integers(len(params)))]
        part_name, shape = params[name][int(random.integers(len(params[name])))]
        place = tuple(int(random.integers(n)) for n in shape)
        if part_name == "vocab":  # a row that the batch uses: the others have no gradient in the embedding
            place = (int(random.choice(tokens)), *place[1:])
        chosen.append((name, part_name, place))
    made = [_gradient_at(model.site.ranks, gradients.get(name), part, place) for name, part, place in chosen]
    return [_check_one(step, dealt, *element, gradient) for element, gradient in zip(chosen, made, strict=True)]


def _looked_up(model: LayeredModel, batches: Sequence[Batch]) -> np.ndarray:
    """The ids whose rows of the embedding the batches train: not that of a padding, which lookups leave as it is."""
    ids = np.concatenate([each.tokens for batch in batches for each in (batch, batch.source) if each is not None])
    held = model.config.held_id if isinstance(model.config, EncoderDecoderConfig) else None
    return ids if held is None else ids[ids != held]


def _everyones_parts(model: LayeredModel) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """The parts of every trained parameter that some rank holds, and their shapes."""
    constants = [layer.bias for _, layer in walk(model.all_layers()) if isinstance(layer, LogitsBias)]
    trained = [(name, param) for name, param in model.named_params() if all(param is not each for each in constants)]
    own = {name: [(part.name, part.shape) for part in param.placement.parts] for name, param in trained}
    return {name: parts for each in model.site.ranks.all_gather_objects(own) for name, parts in each.items()}


def _gradient_at(group: Group, param: Param | None, part_name: str, place: tuple[int, ...]) -> float:
    local = None if param is None else _local_index(param, part_name, place)
    own = None if local is None or param is None else float(param.grad_or_zeros()[local])
    return next(value for value in group.all_gather_objects(own) if value is not None)


def _check_one(
    step: TrainStep, batches: Sequence[Batch], name: str, part_name: str, place: tuple[int, ...], gradient: float
) -> FiniteDifference:
    param = dict(step.model.named_params()).get(name)
    local = None if param is None else _local_index(param, part_name, place)
    epsilon, losses = 1e-5, []
    for sign in (1.0, -2.0):
        if param is not None and local is not None:
            param.data[local] += sign * epsilon
        losses.append(step.evaluate(batches))
    if param is not None and local is not None:
        param.data[local] += epsilon
    label = f"{name}.{part_name}" if part_name else name
    return FiniteDifference(label, place, gradient, (losses[0] - losses[1]) / (2 * epsilon))


def _local_index(param: Param, part_name: str, place: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where the element `place` of a part's global tensor lies in the local array; None: not on this rank."""
    fused = param.placement.fused
    for part, here in param.placement.places():
        if part.name == part_name and all(i in rows for i, rows in zip(place, part.held, strict=True)):
            local = [i - rows.start for i, rows in zip(place, part.held, strict=True)]
            local[fused] += here[fused].start
            return tuple(local)
    return None
