from __future__ import annotations

import pytest

from mpitp.pipeline.actions import Action, Kind
from mpitp.pipeline.schedules import gpipe, one_f_one_b, zero_bubble
from mpitp.pipeline.simulate import Deadlock, Durations, simulate

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRAD


def test_two_stages_one_microbatch_by_hand() -> None:
    timeline = simulate(gpipe(2, 1), Durations(2.0, 3.0, 4.0, send=0.5))
    spans = [[(timed.action.kind, timed.start, timed.stop) for timed in own] for own in timeline.timed]
    assert spans == [[(F, 0, 2), (B, 12, 19)], [(F, 2.5, 4.5), (B, 4.5, 11.5)]]
    assert timeline.length == 19 and timeline.in_flight == [1, 1]
    assert timeline.bubble == pytest.approx(1 - 18 / 38)


def test_a_gradient_that_is_asked_for_too_early_is_a_deadlock() -> None:
    lists = one_f_one_b(2, 2)
    lists[0] = [Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)]
    simulate(lists)  # slow, but it ends
    lists[1] = [Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)]
    with pytest.raises(Deadlock) as found:
        simulate(lists)
    assert str(found.value).splitlines() == [
        "this pipeline schedule can't end:",
        "stage 0 waits, before backward of microbatch 0, for backward of microbatch 0 of stage 1",
        "stage 1 waits, before forward of microbatch 1, for forward of microbatch 1 of stage 0",
    ]


def test_what_nobody_does_is_told() -> None:
    lists = gpipe(2, 1)
    lists[1] = lists[1][:1]
    with pytest.raises(Deadlock, match="for backward of microbatch 0 of stage 1, in whose list it isn't"):
        simulate(lists)


def test_weights_before_inputs_is_a_deadlock() -> None:
    lists = zero_bubble(1, 1)
    lists[0][1], lists[0][2] = lists[0][2], lists[0][1]
    with pytest.raises(Deadlock, match="before weight_grad of microbatch 0, for input_grad of microbatch 0 of stage 0"):
        simulate(lists)


def test_activations_are_held_until_the_weights_have_their_gradient() -> None:
    kinds = [F, Kind.INPUT_GRAD, F, Kind.INPUT_GRAD, W, W]
    timeline = simulate([[Action(kind, i) for kind, i in zip(kinds, (0, 0, 1, 1, 0, 1), strict=True)]])
    assert timeline.in_flight == [2]
    assert simulate(one_f_one_b(1, 2)).in_flight == [1]
