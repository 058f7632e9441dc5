"""Runs a model in the layout at hand and in the one-rank oracle, with the same weights and batch, and compares them.

Rank 0 runs the oracle; it needs the whole model in memory beside its own share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.grad_norm import GradNorm
from mpitp.train.step import TrainStep
from mpitp.verify.compare import Row, Tolerance, compare
from mpitp.verify.finite import refusal_of, refuse_weights
from mpitp.verify.record import Log, attach, record_params, record_updates

MakeModel = Callable[[Group], CausalLM]


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
    """Everything that was compared, in the order in which it was computed."""

    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all is equal within the tolerance."""
        return all(row.ok for row in self.rows)

    def first(self, kind: str) -> Row | None:
        """The first failure among the rows of a kind; for "dx" in backward's own order, from the loss down."""
        return next((row for row in self.rows if row.kind == kind and not row.ok), None)


def verify(group: Group, make_model: MakeModel, batch: Batch, settings: Settings) -> Report:
    """Compare; the report is complete on rank 0, and its `ok` agreed on all ranks by the caller. A collective.

    Raises NumericError when the weights, or what the one-rank model makes of them, are not finite.
    """
    model = make_model(group)
    refuse_weights(model)
    own = _run(model, batch, settings)
    oracle = _run(make_model(SerialGroup()), batch, settings).records if group.rank == 0 else None
    refusal = group.broadcast_object(refusal_of(oracle) if oracle is not None else None)
    if refusal is not None:
        raise refusal
    return Report(compare(group, own.records, oracle, settings.tolerance))


def _run(model: CausalLM, batch: Batch, settings: Settings) -> Log:
    """The weights, one forward and backward pass, all gradients and their norm, then the optimizer steps."""
    log = attach(model)
    record_params(model, log, "start")
    model_norm = GradNorm(model.named_params(), model.layout.group)
    loss, ctx = model.loss_forward(batch)
    log.add("loss", "value", np.array(loss / batch.num_targets))
    model.loss_backward(ctx, 1.0 / batch.num_targets)
    record_params(model, log, "grad")
    log.add("gradient norm", "value", np.array(model_norm()))
    if settings.steps:
        _run_steps(model, batch, settings, log)
    return log


def _run_steps(model: CausalLM, batch: Batch, settings: Settings, log: Log) -> None:
    """Optimizer steps, recorded by their losses, norms and what they have changed the weights by."""
    model.zero_grad()
    train_step = TrainStep(model, AdamW(model.named_params(), AdamWSettings(eps=settings.eps)), settings.clip_norm)
    log.is_open = False
    results = [train_step([batch], settings.lr) for _ in range(settings.steps)]
    log.is_open = True
    for step, result in enumerate(results, start=1):
        log.add(f"loss of step {step}", "value", np.array(result.loss))
        log.add(f"gradient norm of step {step}", "value", np.array(result.grad_norm))
    record_updates(model, log)


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


def finite_differences(model: CausalLM, batch: Batch, count: int, seed: int = 0) -> list[FiniteDifference]:
    """Check `count` randomly chosen parameter elements of a float64 model. A collective, equal on all ranks.

    Each element is one of some rank's own; where it is replicated, every rank changes its replica too, because replicas
    are one element of the model.
    """
    assert model.dtype == np.float64, "central differences drown in float32's rounding"
    group = model.layout.group
    model.zero_grad()
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0 / batch.num_targets)
    params = dict(model.named_params())
    random = np.random.default_rng(seed)
    checks = []
    for _ in range(count):
        name = list(params)[int(random.integers(len(params)))]
        spec = params[name].spec
        part = spec.parts[int(random.integers(len(spec.parts)))]
        place = tuple(int(random.integers(n)) for n in spec.global_shape(part))
        if part.name == "vocab":  # a row that the batch uses: the others have no gradient in the embedding
            place = (int(random.choice(batch.tokens)), *place[1:])
        checks.append(_check_one(model, group, batch, name, part.name, place))
    return checks


def _check_one(
    model: CausalLM, group: Group, batch: Batch, name: str, part_name: str, place: tuple[int, ...]
) -> FiniteDifference:
    param = dict(model.named_params())[name]
    local = _local_index(param, part_name, place)
    gradients = group.all_gather_objects(None if local is None or param.grad is None else float(param.grad[local]))
    gradient = next(value for value in gradients if value is not None)
    epsilon, losses = 1e-5, []
    for sign in (1.0, -2.0):
        if local is not None:
            param.data[local] += sign * epsilon
        losses.append(model.loss_forward(batch)[0] / batch.num_targets)
    if local is not None:
        param.data[local] += epsilon
    label = f"{name}.{part_name}" if part_name else name
    return FiniteDifference(label, place, gradient, (losses[0] - losses[1]) / (2 * epsilon))


def _local_index(param: Any, part_name: str, place: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where the element `place` of a part's global tensor lies in the local array; None: not on this rank."""
    dim = param.spec.dim
    for part, rows in param.spec.local_parts():
        if part.name == part_name and place[dim] in part.held:
            row = rows.start + place[dim] - part.held.start
            return place[:dim] + (row,) + place[dim + 1 :]
    return None
