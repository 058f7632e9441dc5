from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitp.errors import ConfigError
from mpitp.pipeline.actions import Action, Kind
from mpitp.pipeline.schedules import (
    SCHEDULES,
    Lists,
    gpipe,
    interleaved,
    make_schedule,
    most_in_flight,
    one_f_one_b,
    zero_bubble,
)
from mpitp.pipeline.simulate import Durations, Timeline, simulate

Sizes = tuple[int, int, int]


def all_sizes(name: str) -> Iterator[Sizes]:
    """(stages, microbatches, chunks) up to 8 x 16, fewer microbatches than stages among them."""
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            if name != "interleaved":
                yield stages, microbatches, 1
            elif microbatches % stages == 0:
                yield from ((stages, microbatches, chunks) for chunks in (2, 3, 4))


@pytest.fixture(scope="module", params=SCHEDULES)
def family(request: pytest.FixtureRequest) -> tuple[str, dict[Sizes, tuple[Lists, Timeline]]]:
    """Every size of one schedule; none of them is a deadlock."""
    made = {sizes: make_schedule(request.param, *sizes) for sizes in all_sizes(request.param)}
    assert len(made) > 50
    return request.param, {sizes: (lists, simulate(lists)) for sizes, lists in made.items()}


Family = tuple[str, dict[Sizes, tuple[Lists, Timeline]]]


def test_each_microbatch_goes_through_each_stage_once_in_each_pass(family: Family) -> None:
    name, cases = family
    kinds = [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD] if name == "zb" else [Kind.FORWARD, Kind.BACKWARD]
    for (stages, microbatches, chunks), (lists, _) in cases.items():
        assert len(lists) == stages
        once = Counter(Action(kind, i, c) for kind in kinds for i in range(microbatches) for c in range(chunks))
        assert all(Counter(own) == once for own in lists)


def test_nothing_starts_before_what_it_needs(family: Family) -> None:
    """Written out over the parts of the model, without the functions that the simulator uses."""
    name, cases = family
    back = Kind.INPUT_GRAD if name == "zb" else Kind.BACKWARD
    for (stages, microbatches, chunks), (_, timeline) in cases.items():
        start, stop = {}, {}
        for timed in (timed for own in timeline.timed for timed in own):
            key = timed.action.kind, timed.action.microbatch, timed.action.chunk * stages + timed.stage
            start[key], stop[key] = timed.start, timed.stop
        last = stages * chunks - 1
        for i in range(microbatches):
            assert all(stop[Kind.FORWARD, i, part] <= start[Kind.FORWARD, i, part + 1] for part in range(last))
            assert all(stop[back, i, part + 1] <= start[back, i, part] for part in range(last))
            assert stop[Kind.FORWARD, i, last] <= start[back, i, last]
            if name == "zb":
                assert all(
                    stop[back, i, part] <= start[Kind.WEIGHT_GRAD, i, part] for part in range(last + 1)
                )  # fmt: skip


def test_no_stage_does_two_things_at_once(family: Family) -> None:
    for _, timeline in family[1].values():
        for own in timeline.timed:
            assert all(first.stop <= second.start for first, second in zip(own, own[1:], strict=False))


def test_activations_in_flight_are_those_of_the_formula(family: Family) -> None:
    name, cases = family
    for sizes, (_, timeline) in cases.items():
        assert timeline.in_flight == most_in_flight(name, *sizes)


def test_formulas_of_activations_in_flight() -> None:
    assert most_in_flight("gpipe", 4, 8) == [8, 8, 8, 8]
    assert most_in_flight("1f1b", 4, 8) == [4, 3, 2, 1]
    assert most_in_flight("1f1b", 4, 2) == [2, 2, 2, 1]
    assert most_in_flight("zb", 4, 8) == [4, 4, 4, 4]
    assert most_in_flight("interleaved", 4, 8, 2) == [11, 9, 7, 5]


def test_bubble_is_that_of_the_formula_with_unit_times(family: Family) -> None:
    name, cases = family
    for (p, m, v), (_, timeline) in cases.items():
        idle = 2 * (p - 1) - (min(m, p) - 1) if name == "zb" else 3 * (p - 1) / v
        assert timeline.length == pytest.approx(3 * m + idle)
        assert timeline.bubble == pytest.approx(idle / (3 * m + idle), abs=1e-12)


def test_bubbles_of_four_stages_and_eight_microbatches() -> None:
    shares = [simulate(make_schedule(name, 4, 8, 2 if name == "interleaved" else 1)).bubble for name in SCHEDULES]
    assert shares == pytest.approx([3 / 11, 3 / 11, 3 / 19, 3 / 27])


@pytest.mark.parametrize("stages", range(2, 9))
def test_zero_bubble_is_a_third_of_1f1b(stages: int) -> None:
    for microbatches in range(stages, 17):
        work = 3 * microbatches
        idle = simulate(zero_bubble(stages, microbatches)).length - work
        assert 3 * idle == simulate(one_f_one_b(stages, microbatches)).length - work
    for microbatches in range(1, stages):
        assert simulate(zero_bubble(stages, microbatches)).length < simulate(one_f_one_b(stages, microbatches)).length


times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 4.0])


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 8), st.integers(0, 8), times, times, times)
def test_zero_bubble_with_any_times(p: int, more: int, f: float, b: float, w: float) -> None:
    durations, m = Durations(f, b, w), p + more
    assert simulate(zero_bubble(p, m), durations).length == m * (f + b + w) + (p - 1) * max(f + b - w, f, b)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 4), times, times, times, st.sampled_from([0.0, 0.5, 3.0]))
def test_every_schedule_ends_and_messages_only_cost(
    p: int, rounds: int, v: int, f: float, b: float, w: float, send: float
) -> None:
    for name in SCHEDULES:
        lists = make_schedule(name, p, p * rounds, v if name == "interleaved" else 1)
        quick, slow = (simulate(lists, Durations(f, b, w, cost)) for cost in (0.0, send))
        assert sum(map(len, slow.timed)) == sum(map(len, lists))
        assert slow.length >= quick.length and quick.length >= p * rounds * (f + b + w) - 1e-9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 10, 2), r"10 microbatches = 2 x 4 stages \+ 2; 8 or 12 microbatches work"),
        ((4, 3, 2), r"3 microbatches = 0 x 4 stages \+ 3; 4 microbatches work"),
        ((4, 8, 1), "at least 2 chunks a stage, not 1"),
        ((0, 8, 2), "at least 1 stage, not 0"),
        ((4, 0, 2), "at least 1 microbatch, not 0"),
    ],
)
def test_interleaved_refuses_with_arithmetic(arguments: Sizes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        interleaved(*arguments)


def test_the_numbers_that_a_refusal_names_work() -> None:
    for stages in range(2, 9):
        for microbatches in (m for m in range(1, 20) if m % stages):
            with pytest.raises(ConfigError) as refused:
                interleaved(stages, microbatches)
            named = str(refused.value).split("; ")[1].split(" microbatches work")[0].split(" or ")
            for number in map(int, named):
                assert abs(number - microbatches) < stages
                simulate(interleaved(stages, number))


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="no pipeline schedule 'zbv'; there are gpipe, 1f1b, interleaved, zb"):
        make_schedule("zbv", 4, 8)
    with pytest.raises(ConfigError, match="schedule zb has one chunk a stage, not 2"):
        make_schedule("zb", 4, 8, 2)
    for schedule in (gpipe, one_f_one_b, zero_bubble):
        with pytest.raises(ConfigError, match="at least 1 stage, not -1"):
            schedule(-1, 8)
