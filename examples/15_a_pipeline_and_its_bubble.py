"""15  Pipeline parallelism: layers dealt to stages, microbatches in turn; what waits, and what a schedule changes.

    stage s has layer s:  y = tanh(x W_s^T)      x comes from stage s - 1, y goes to s + 1; dy and dx the other way
    idle share of GPipe and 1F1B, m microbatches on p stages                           (p - 1) / (m + p - 1)

A schedule is a list of actions for each stage, data that can be drawn, timed and checked before anything runs:
F forward, B backward; zero-bubble splits B into I (dx, for which the stage before waits) and W (dW, for which nobody
does), and fills the idle time with W. Sends are started and not waited for, so no order of them can hang.
"""

import numpy as np
from course import exercise, on_ranks, prove, say

from mpitp.comm import Group
from mpitp.pipeline.actions import Kind, grid_of, receive_before, send_after
from mpitp.pipeline.schedules import make_schedule
from mpitp.pipeline.simulate import simulate
from mpitp.plan.text_chart import text_chart

RANKS = 4
MICROBATCHES, ROWS, WIDTH = 6, 3, 5


class Stage:
    """One layer, its gradient, and the contexts of the microbatches that are under way."""

    def __init__(self, w: np.ndarray, targets: np.ndarray | None) -> None:
        self.w, self.dw, self.targets = w, np.zeros_like(w), targets
        self.kept, self.owed, self.loss, self.most_kept = {}, {}, 0.0, 0

    def forward(self, i: int, x: np.ndarray) -> np.ndarray:
        y = np.tanh(x @ self.w.T)
        self.kept[i] = x, y
        self.most_kept = max(self.most_kept, len(self.kept))
        return y

    def input_grad(self, i: int, dy: np.ndarray | None) -> np.ndarray:
        x, y = self.kept[i]
        if self.targets is not None:  # the last stage: the loss is |y - target|^2 / 2
            dy = y - self.targets[i]
            self.loss += 0.5 * float((dy**2).sum())
        self.owed[i] = dy * (1 - y**2)
        return self.owed[i] @ self.w

    def weight_grad(self, i: int) -> None:
        self.dw += self.owed.pop(i).T @ self.kept.pop(i)[0]


def run(group: Group, schedule: str, stage: Stage, batches: np.ndarray) -> None:
    """Walk through this stage's list."""
    lists = make_schedule(schedule, group.size, MICROBATCHES)
    grid, like, sends = grid_of(lists), np.empty((ROWS, WIDTH)), []
    for action in lists[group.rank]:
        i, source = action.microbatch, receive_before(action, group.rank, grid)
        received = None if source is None else group.recv(like, source.peer, source.tag)
        made = None
        if action.kind is Kind.FORWARD:
            made = stage.forward(i, batches[i] if received is None else received)
        if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            made = stage.input_grad(i, received)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            stage.weight_grad(i)
        if (target := send_after(action, group.rank, grid)) is not None:
            sends.append(group.start_send(made, target.peer, target.tag))
    for pending in sends:
        pending.wait()


def main(group: Group) -> None:
    random = np.random.default_rng(15)
    batches, targets = random.standard_normal((2, MICROBATCHES, ROWS, WIDTH))
    weights = random.standard_normal((group.size, WIDTH, WIDTH))
    dx, activations = None, [batches.reshape(-1, WIDTH)]  # all layers on one rank
    for w in weights:
        activations.append(np.tanh(activations[-1] @ w.T))
    dx, grads = activations[-1] - targets.reshape(-1, WIDTH), []
    for w, x, y in zip(weights[::-1], activations[-2::-1], activations[:0:-1], strict=True):
        dz = dx * (1 - y**2)
        grads.insert(0, dz.T @ x)
        dx = dz @ w

    for schedule in ("gpipe", "1f1b", "zb"):
        timeline = simulate(make_schedule(schedule, group.size, MICROBATCHES))
        say(group, f"{schedule}: idle {timeline.bubble:.1%}\n{text_chart(timeline, 80)}")
        stage = Stage(weights[group.rank], targets if group.rank == group.size - 1 else None)
        run(group, schedule, stage, batches)
        held = group.all_gather_objects(stage.most_kept)
        prove(group, f"dW ({held} activations held)", (stage.dw, grads[group.rank]), limit=1e-10)
        say(group)
    exercise(
        group,
        "How many microbatches does 1F1B need here for an idle share below 10 %? And what do GPipe and 1F1B hold then?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
