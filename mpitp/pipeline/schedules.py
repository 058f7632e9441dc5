"""Pipeline schedules: pure functions that return for every stage its list of actions.

With p stages, m microbatches and v chunks a stage; a stage needs T = F + B + W for a microbatch (forward, input
gradients, weight gradients), and messages take no time. Every stage is idle for the same time of a step of length
m T + idle, and `idle / (m T + idle)` is the bubble's share:

| schedule      | idle                         | the bubble's share      | activations in flight on stage s         |
|---------------|------------------------------|-------------------------|------------------------------------------|
| `gpipe`       | (p - 1) T                    | (p - 1) / (m + p - 1)   | m                                        |
| `one_f_one_b` | (p - 1) T                    | (p - 1) / (m + p - 1)   | min(m, p - s)                            |
| `interleaved` | (p - 1) T / v                | (p - 1) / (v m + p - 1) | min(v m, 2 (p - s - 1) + (v - 1) p + 1), |
|               |                              |                         | each of one chunk                        |
| `zero_bubble` | (p - 1) max(F + B - W, F, B) | (p - 1) / (3 m + p - 1) | min(m, p)                                |
|               |                              | where F = B = W         |                                          |

An activation is in flight from the start of its forward until its last gradient is done. zero_bubble's line holds for
m >= p: with F = B = W a third of 1F1B's idle time. With fewer microbatches fewer weight gradients fill the gaps: where
F = B = W, (p - 1) (F + B) - (min(m, p) - 1) W is idle. Messages that take time add to all of these; `simulate` counts.

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2019 (PipeDream, SOSP) and 2021 (Megatron-LM,
arXiv 2104.04473) for 1F1B with a flush at the end of the step and its interleaved form; Qi et al. 2023 (Zero Bubble
Pipeline Parallelism, arXiv 2401.10241), schedule ZB-H1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpitp.errors import ConfigError
from mpitp.pipeline.actions import Action, Kind

Lists = list[list[Action]]

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRAD


def gpipe(stages: int, microbatches: int) -> Lists:
    """All forwards, then all backwards, the newest first (its activations are the warmest)."""
    _check_counts(stages, microbatches)
    forwards = [Action(F, i) for i in range(microbatches)]
    backwards = [Action(B, i) for i in reversed(range(microbatches))]
    return [forwards + backwards for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> Lists:
    """1F1B: p - s - 1 forwards ahead, then one backward after each forward, so that few activations are held."""
    _check_counts(stages, microbatches)
    forwards = [Action(F, i) for i in range(microbatches)]
    backwards = [Action(B, i) for i in range(microbatches)]
    return [_alternate(forwards, backwards, stages - stage - 1) for stage in range(stages)]


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Lists:
    """1F1B over `chunks` smaller pieces a stage: the pipeline fills and drains `chunks` times as fast.

    Microbatches go through in rounds of p: p of them through chunk 0, the same p through chunk 1, and so on, so that a
    stage is back at a microbatch just when it has come round. Raises ConfigError where they don't make whole rounds.
    """
    _check_counts(stages, microbatches)
    _check_rounds(stages, microbatches, chunks)
    visits = list(_rounds(stages, microbatches, chunks))
    forwards = [Action(F, i, c) for i, c in visits]
    backwards = [Action(B, i, chunks - 1 - c) for i, c in visits]
    ahead = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return [_alternate(forwards, backwards, count) for count in ahead]


def zero_bubble(stages: int, microbatches: int) -> Lists:
    """ZB-H1: 1F1B's order, with backward split, and stage s putting off s weight gradients into its idle end.

    The stage before gets its gradient B instead of B + W later, and every stage holds at most p activations, as 1F1B's
    first stage does.
    """
    _check_counts(stages, microbatches)
    forwards = [Action(F, i) for i in range(microbatches)]
    inputs = [Action(Kind.INPUT_GRAD, i) for i in range(microbatches)]
    orders = [_alternate(forwards, inputs, stages - stage - 1) for stage in range(stages)]
    return [_with_weight_grads(order, stage) for stage, order in enumerate(orders)]


SCHEDULES: dict[str, Callable[..., Lists]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb": zero_bubble,
}


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Lists:
    """The lists of the schedule `name`. Raises ConfigError for a name or numbers that there is no schedule of."""
    if name not in SCHEDULES:
        raise ConfigError(f"there is no pipeline schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks)
    if chunks != 1:
        raise ConfigError(f"schedule {name} has one chunk a stage, not {chunks}; schedule interleaved has more")
    return SCHEDULES[name](stages, microbatches)


def most_in_flight(name: str, stages: int, microbatches: int, chunks: int = 1) -> list[int]:
    """By the formulas above: the activations (of one chunk each) that each stage must have room for."""
    ahead = {
        "gpipe": lambda _: microbatches,
        "1f1b": lambda stage: stages - stage,
        "interleaved": lambda stage: 2 * (stages - stage - 1) + (chunks - 1) * stages + 1,
        "zb": lambda _: stages,
    }[name]
    return [min(microbatches * chunks, ahead(stage)) for stage in range(stages)]


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    rest = backwards[len(forwards) - ahead :]
    return [*forwards[:ahead], *(action for pair in pairs for action in pair), *rest]


def _rounds(stages: int, microbatches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(microbatch, chunk) in the order in which every stage meets them going forward."""
    for first in range(0, microbatches, stages):
        for chunk in range(chunks):
            yield from ((first + i, chunk) for i in range(stages))


def _with_weight_grads(order: list[Action], put_off: int) -> list[Action]:
    """After each input gradient the weight gradient of `put_off` microbatches before; the last ones at the end."""
    result: list[Action] = []
    count = sum(action.kind is Kind.INPUT_GRAD for action in order)
    for action in order:
        result.append(action)
        if action.kind is Kind.INPUT_GRAD and action.microbatch >= put_off:
            result.append(Action(W, action.microbatch - put_off))
    return result + [Action(W, i) for i in range(max(0, count - put_off), count)]


def _check_counts(stages: int, microbatches: int) -> None:
    for what, count in (("stage", stages), ("microbatch", microbatches)):
        if count < 1:
            raise ConfigError(f"a pipeline has at least 1 {what}, not {count}")


def _check_rounds(stages: int, microbatches: int, chunks: int) -> None:
    if chunks < 2:
        raise ConfigError(f"schedule interleaved needs at least 2 chunks a stage, not {chunks}; with one it is 1f1b")
    rounds, left = divmod(microbatches, stages)
    if left:
        near = [str(count * stages) for count in (rounds, rounds + 1) if count]
        raise ConfigError(
            f"schedule interleaved takes microbatches in rounds of one for each stage: {microbatches} microbatches = "
            f"{rounds} x {stages} stages + {left}; {' or '.join(near)} microbatches work, or schedule 1f1b"
        )
