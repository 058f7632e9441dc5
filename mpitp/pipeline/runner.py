"""Runs a stage's list of actions: microbatches through this rank's chunks, messages to and from its neighbours.

    stage s, for every action of its list
      start the receives that this action and the next one need
      wait for this action's, compute, start to send what it gives
      let go of what has been sent

Sends are waited for at the end of the step only, so a stage stands still for nothing but what another has yet to
compute (`actions.py` says why that can't be a deadlock). The contexts of a microbatch are held from its forward until
its backward takes them; weight gradients that are put off hold what they need by themselves.

The auxiliary losses of a mixture of experts are one mean over the blocks of all stages: a stage sends what its routers
and those before have counted behind each activation, and behind each gradient what all have, and what it weighs.

A parameter of several stages (a tied embedding) has a summand of its gradient on each; they are added when all is done.
An encoder's output goes beside the decoder's activations, its gradient beside theirs (`models/beside.py`).

In the invariant mode all weight gradients are put off to the end of the step, where each microbatch's are computed by
themselves, in the order of their numbers: they are then added as on one rank, to the bit, at the cost of activations of
all microbatches being held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.group import Group, Pending
from mpitp.layers.deferral import Deferral, Task
from mpitp.layers.gathered import finish_scatters
from mpitp.layers.param import Param
from mpitp.layers.passes import Pass
from mpitp.models.batch import Batch
from mpitp.models.layered import LayeredModel, ObjectiveContext
from mpitp.models.runner import NOTHING, Measure, Progress, Runner
from mpitp.pipeline.actions import Action, Grid, Kind, Message, receive_before, send_after
from mpitp.pipeline.schedules import make_schedule

AHEAD = 2  # actions whose receives are started: this one's and the next one's
TAGS = 1 << 14  # messages between two stages have tags below it; so many are never under way at once
TIED_TAG = TAGS


class PipelineRunner(Runner):
    """Microbatches through the stages of `model`, along the axis pp of its mesh, as `schedule` of that name says.

    `progress` is told when all is done. Losses are those of the last stage, on all.
    """

    def __init__(self, model: LayeredModel, schedule: str, progress: Progress | None = None) -> None:
        self.model, self.schedule, self.progress = model, schedule, progress or Progress()
        self.group = model.site.mesh["pp"]
        self.grid = Grid(self.group.size, len(model.chunks))
        params = [param for _, param in model.named_params()]
        self.deferral = params[0].deferral or Deferral()  # another runner of the same model has given it one
        for param in params:
            param.deferral = self.deferral

    def __call__(self, batches: Sequence[Batch], scale: float) -> list[float]:
        if not batches:
            return []
        actions = _schedule(self.schedule, self.grid, len(batches))[self.group.rank]
        walk = _Walk(self, batches, scale, in_order=self.model.site.num_blocks > 0)
        losses = walk.all(actions)
        for tasks in walk.rest():
            for task in tasks:
                task()
            finish_scatters(self.model.layers)
            sum_tied(self.model)
            for name in reversed(self.model.layers):
                self.progress.layer_done(name)
            self.progress.batch_done()
        return [loss for (loss,) in self._of_last_stage(losses, 1)]

    def rounds(self, batches: Sequence[Batch]) -> int:
        return len(batches) if self.model.site.num_blocks else min(len(batches), 1)

    def measure(self, batches: Iterable[Batch], measure: Measure) -> list[list[float]]:
        found = []
        for number, batch in enumerate(batches):
            actions = [Action(Kind.FORWARD, number % TAGS, chunk) for chunk in range(self.grid.chunks)]
            walk = _Walk(self, {number % TAGS: batch}, 0.0, measure=measure)
            found += walk.all(actions)
            walk.held.clear()
        return self._of_last_stage(found, 1 + measure.count)

    def _of_last_stage(self, found: list[list[float]], width: int) -> list[list[float]]:
        """What the last stage has found of each microbatch, so many numbers; the others have as many noughts."""
        table = np.zeros((len(found), width))
        if self.group.rank == self.group.size - 1:
            table[...] = np.reshape(found, table.shape)
        return self.group.broadcast(table, self.group.size - 1).tolist()


@lru_cache
def _schedule(name: str, grid: Grid, microbatches: int) -> list[list[Action]]:
    return make_schedule(name, grid.stages, microbatches, grid.chunks)


@dataclass(slots=True)
class _Held:
    """What backward needs of one microbatch through one chunk. `loss`: of the last chunk only."""

    ctxs: list[Any]
    loss: ObjectiveContext | None


class _Walk:
    """One stage's way through its list in one step. `in_order`: all weight gradients are put off to its end."""

    def __init__(
        self,
        runner: PipelineRunner,
        batches: Sequence[Batch] | dict[int, Batch],
        scale: float,
        *,
        in_order: bool = False,
        measure: Measure = NOTHING,
    ) -> None:
        self.in_order, self.measure = in_order, measure
        self.model, self.group, self.grid, self.deferral = runner.model, runner.group, runner.grid, runner.deferral
        self.batches, self.scale = batches, scale
        self.passes: dict[int, Pass] = {}
        self.held: dict[tuple[int, int], _Held] = {}
        self.put_off: dict[tuple[int, int], list[Task]] = {}
        self.coming: dict[Action, list[Pending]] = {}
        self.going: list[Pending] = []
        self.found: dict[int, list[float]] = {}

    def all(self, actions: Sequence[Action]) -> list[list[float]]:
        """Do all; of each microbatch in their order the loss and what is measured, nothing but on the last stage."""
        do = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._input_grad if self.in_order else self._backward}
        do |= {Kind.INPUT_GRAD: self._input_grad, Kind.WEIGHT_GRAD: self._weight_grad}
        for place, action in enumerate(actions):
            for near in actions[place : place + AHEAD]:
                self._expect(near)
            do[action.kind](action)
            self.going = [pending for pending in self.going if not pending.test()]
        for pending in self.going:
            pending.wait()
        return [self.found[number] for number in sorted(self.found)]

    def _forward(self, action: Action) -> None:
        batch, chunk = self.batches[action.microbatch], self.model.chunks[action.chunk]
        run = self.passes.setdefault(action.microbatch, self.model.new_pass(batch))
        arrays, counted = self._received(action)
        self.model.beside.take(run, arrays[1:])
        if run.balance is not None:
            run.balance.go_on_from(counted)
        y, ctxs = self.model.forward_chunk(chunk, arrays[0] if arrays else self.model.inputs(batch), run)
        loss_ctx = None
        self.found.setdefault(action.microbatch, [])
        if chunk.ends_in_loss:
            loss, loss_ctx = self.model.objective(y, batch, run)
            self.found[action.microbatch] = [loss, *self.measure.of(self.model, y, batch)]
        self.held[action.microbatch, action.chunk] = _Held(ctxs, loss_ctx)
        numbers = None if run.balance is None else run.balance.so_far()
        self._send(action, [y, *self.model.beside.give(run, chunk)], numbers)

    def _backward(self, action: Action) -> None:
        held = self.held.pop((action.microbatch, action.chunk))
        run, chunk = self.passes[action.microbatch], self.model.chunks[action.chunk]
        balance = run.balance
        if action.chunk == 0:  # the last that a microbatch comes to
            del self.passes[action.microbatch]
        if held.loss is not None:
            dy = self.model.dobjective(held.loss, self.scale)
        else:
            arrays, weighed = self._received(action)
            dy = arrays[0]
            self.model.beside.take_grads(run, arrays[1:])
            if balance is not None:
                balance.take_weighed(weighed)
        dx = self.model.backward_chunk(chunk, dy, held.ctxs)
        numbers = None if balance is None else balance.weighed()
        self._send(action, [dx, *self.model.beside.give_grads(run, chunk)], numbers)

    def _input_grad(self, action: Action) -> None:
        with self.deferral.open() as tasks:
            self._backward(action)
        self.put_off[action.microbatch, action.chunk] = tasks

    def _weight_grad(self, action: Action) -> None:
        if not self.in_order:
            for task in self.put_off.pop((action.microbatch, action.chunk)):
                task()

    def rest(self) -> Iterator[list[Task]]:
        """What is left to be done for the gradients of each microbatch; where they are there, of all at once."""
        for number in range(len(self.batches)) if self.in_order else ():
            keys = [(number, chunk) for chunk in reversed(range(self.grid.chunks))]
            yield [task for key in keys for task in self.put_off.pop(key)]
        if not self.in_order:
            yield []

    def _expect(self, action: Action) -> None:
        """Start to receive what an action needs, once."""
        message = receive_before(action, self.group.rank, self.grid)
        if message is not None and action not in self.coming:
            own = self.coming[action] = []
            for like in (*self._arrays(action), *self._numbers(action)):
                own.append(self.group.start_recv(like, message.peer, _tag(message)))

    def _arrays(self, action: Action) -> list[Array]:
        """Like what comes for an action."""
        batch, chunk = self.batches[action.microbatch], self.model.chunks[action.chunk]
        shapes = self.model.beside.shapes(batch, chunk, entering=action.kind is Kind.FORWARD)
        return [self.model.device.xp.empty(shape, self.model.dtype) for shape in shapes]

    def _numbers(self, action: Action) -> list[np.ndarray]:
        """Like what comes behind an activation or a gradient: the auxiliary losses' numbers, where there are such."""
        rule = self.model.balance_rule
        if rule is None:
            return []
        return [rule.empty if action.kind is Kind.FORWARD else np.append(rule.empty, 0.0)]

    def _received(self, action: Action) -> tuple[list[Array], np.ndarray | None]:
        """The arrays that were sent for an action, and the numbers behind them; None where there are none."""
        found = [pending.wait() for pending in self.coming.pop(action, ())]
        has_numbers = bool(found) and self.model.balance_rule is not None
        return (found[:-1], found[-1]) if has_numbers else (found, None)

    def _send(self, action: Action, arrays: list[Array], numbers: np.ndarray | None) -> None:
        """Messages of one tag arrive in the order in which they were sent."""
        message = send_after(action, self.group.rank, self.grid)
        if message is not None:
            for array in arrays if numbers is None else [*arrays, numbers]:
                self.going.append(self.group.start_send(array, message.peer, _tag(message)))


def sum_tied(model: LayeredModel) -> None:
    """Add the summands of every gradient whose parameter is on several stages. A collective."""
    group = model.site.mesh["pp"]
    params = dict(model.named_params())
    for first in dict.fromkeys(model.tied.values()):
        holders = model.stages_with(first)
        if group.rank in holders and len(holders) > 1:
            _add_others(params[first], group, holders)


def _add_others(param: Param, group: Group, holders: Sequence[int]) -> None:
    """All summands, in the order in which backward comes to the stages, on each that holds the parameter."""
    others = [stage for stage in holders if stage != group.rank]
    sent = [group.start_send(param.grad, stage, TIED_TAG) for stage in others]
    summands = {stage: group.recv(param.grad, stage, TIED_TAG) for stage in others} | {group.rank: param.grad}
    first, *later = (summands[stage] for stage in holders)
    param.grad = sum(later, start=first)
    for pending in sent:
        pending.wait()


def _tag(message: Message) -> int:
    return message.tag % TAGS
