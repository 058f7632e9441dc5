"""The search against all layouts tried one by one; its bounds; what it says where nothing fits or can be dealt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpitp.config import RunConfig
from mpitp.errors import ConfigError
from mpitp.plan.cost import Step, cost_of
from mpitp.plan.layout import Layout, changed
from mpitp.plan.search import Best, Estimate, Problem, _groups, estimates_of, explore, fastest, search, smallest
from mpitp.plan.space import Units, check_layout, check_ranks, cuts_of, layouts_of, schedules_of
from tests.plan.cases import anatomy_of, decoder_of, machine, run_of

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 4, {}),
    ("gpt2", 6, {"model.dtype": "bfloat16"}),
    ("gemma2", 8, {"train.global_batch_size": 16}),
    ("moe", 3, {"train.global_batch_size": 6}),
    ("moe", 8, {"train.global_batch_size": 4}),
]


def problem_of(config: RunConfig, limit: float = math.inf) -> Problem:
    units = Units.of(decoder_of(config), config.data.seq_len, config.global_batch_size)
    on = replace(machine(), machine=replace(machine().machine, ranks_per_node=4))
    return Problem(anatomy_of(config, on), units, Step(config.global_batch_size), limit)


def all_estimates(problem: Problem, ranks: int) -> list[Estimate]:
    groups = _groups(replace(problem, limit=math.inf), ranks, lambda layout: True)
    return [each for group in groups for each in estimates_of(problem, group.without_zero)]


@pytest.mark.parametrize(("kind", "ranks", "changes"), CASES, ids=str)
def test_pruned_finds_what_trying_all_finds(kind: str, ranks: int, changes: dict[str, Any]) -> None:
    problem = problem_of(run_of(kind, changes))
    every = all_estimates(problem, ranks)
    assert sorted(map(str, layouts_of(problem.units, ranks))) == sorted(str(one.layout) for one in every)
    for limit in (math.inf, sorted(one.num_bytes for one in every)[len(every) // 4]):
        limited = replace(problem, limit=limit)
        best = explore(limited, ranks, 6)
        order = sorted((one.seconds, one.num_bytes) for one in every if one.num_bytes <= limit)
        assert [(one.seconds, one.num_bytes) for one in best.fastest] == order[:6]
        for one in best.front:
            assert not any(x < one.seconds and y <= one.num_bytes for x, y in order)
        assert best.seen < len(every)


@pytest.mark.parametrize(("kind", "ranks", "changes"), CASES, ids=str)
def test_no_layout_is_below_the_bounds_of_its_group(kind: str, ranks: int, changes: dict[str, Any]) -> None:
    problem = problem_of(run_of(kind, changes))
    for group in list(_groups(problem, ranks, lambda layout: True))[::9]:
        for one in list(estimates_of(problem, group.without_zero))[:2]:
            cost = cost_of(problem.anatomy, problem.step, one.layout)
            assert group.seconds <= one.seconds and group.num_bytes <= one.num_bytes
            assert one.num_bytes <= cost.memory.total
            assert one.seconds == pytest.approx(cost.seconds, rel=0.2)  # stages of a tiny model are uneven


@pytest.mark.parametrize("seed", range(6))
def test_bounds_of_bytes_hold_in_random_layouts(seed: int) -> None:
    """Of models whose heads, columns and words don't come out even over tp, so that no rank has most of everything."""
    rng = np.random.default_rng(seed)
    kv_heads, in_group, blocks = (int(rng.integers(1, most)) for most in (5, 7, 5))
    config = _uneven(["llama", "moe"][seed % 2], kv_heads * in_group, kv_heads, blocks + 1, rng.integers(20, 400, 2))
    problem = problem_of(config)
    for ranks in {int(n) for n in rng.integers(2, 13, 3)}:
        groups = list(_groups(problem, ranks, lambda layout: True))
        for number in rng.integers(0, max(len(groups), 1), min(8, len(groups))):
            estimates = list(estimates_of(problem, groups[number].without_zero))
            for place in rng.integers(0, len(estimates), 3):
                _check_bounds(problem, groups[number], estimates[place])


def test_bounds_of_bytes_hold_where_two_ranks_have_most_of_something() -> None:
    """15 heads in 3 groups over 4 ranks: the first rank has most columns and words, the second most KV heads."""
    problem = problem_of(_uneven("llama", 15, 3, 2, (133, 301)))
    for group in _groups(problem, 4, lambda layout: layout.tp == 4):
        for estimate in estimates_of(problem, group.without_zero):
            _check_bounds(problem, group, estimate)


def _uneven(kind: str, heads: int, kv_heads: int, blocks: int, widths: Sequence[int]) -> RunConfig:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": blocks}
    sizes |= {"intermediate_size": int(widths[0]), "vocab_size": int(widths[1])}
    return run_of(kind, {f"model.{key}": value for key, value in sizes.items()} | {"train.global_batch_size": 12})


def _check_bounds(problem: Problem, group: Estimate, one: Estimate) -> None:
    exact = cost_of(problem.anatomy, problem.step, one.layout).memory.total
    assert group.num_bytes <= one.num_bytes <= exact, one.layout


def test_what_is_told_fits_and_is_in_order() -> None:
    problem = problem_of(run_of("llama", {}))
    least = smallest(problem, 3).memory.total
    every = [cost_of(problem.anatomy, problem.step, layout) for layout in layouts_of(problem.units, 3)]
    assert least == min(cost.memory.total for cost in every)
    found = search(replace(problem, limit=1.3 * least), 3, 3)
    assert len(found.best) == 3 and all(cost.memory.total <= 1.3 * least for cost in [*found.best, *found.front])
    assert [cost.seconds for cost in found.best] == sorted(cost.seconds for cost in found.best)
    fitting = [cost.seconds for cost in every if cost.memory.total <= 1.3 * least]
    assert found.best[0].seconds <= 1.05 * min(fitting)
    only = fastest(problem, 3, lambda layout: layout.tp == 3)
    assert only is not None and only.layout.tp == 3
    with pytest.raises(ConfigError, match=r"no layout on 3 ranks fits into .*: the least is .*, of .* \(weights"):
        search(replace(problem, limit=0.9 * least), 3)


def test_ranks_without_units_are_named_with_the_arithmetic() -> None:
    units = Units(heads=6, blocks=4, tokens=16, sequences=24)
    with pytest.raises(ConfigError, match=r"11 ranks .* tp goes to 6 .* pp to 4 .* cp to 8 .*; 10 or 12 ranks can"):
        check_ranks(replace(units, sequences=4), 11)
    check_ranks(units, 11)
    assert {layout.ep for layout in layouts_of(replace(units, experts=5), 12)} == {1, 2, 3, 4}
    for layout, told in (
        (Layout(tp=7), "tp=7 is more than there are query heads: 6"),
        (Layout(pp=2, schedule="interleaved", chunks=4, micro=1), "pp=2 x chunks=4 = 8 parts"),
        (Layout(dp=24, micro=2), "24 sequences / micro=2 = 12 microbatches, but dp=24 x pp=1 = 24"),
        (Layout(ep=2), "ep=2 is more than there are experts: 1"),
        (Layout(micro=5), "micro=5 doesn't divide the step's 24 sequences"),
        (Layout(dp=2, pp=2, zero=3, schedule="zb"), "zero=3 doesn't go with"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_layout(units, layout)
    for layout in layouts_of(units, 12):
        check_layout(units, layout)
    assert all(list(schedules_of(units, cut)) for cut in cuts_of(units, 12))


def test_a_layout_in_words() -> None:
    start = Layout(tp=4, zero=1, micro=2)
    found = changed(start, "pp=2,tp=2,schedule=interleaved recompute=full,sp", 8)
    assert found == Layout(2, 2, 1, 2, True, 1, "full", "interleaved", 2, 2)
    assert str(found) == "tp=2 pp=2 dp=2 sp zero=1 interleaved x2 recompute=full micro=2"
    apart = changed(start, "ep=2,tp=2", 8)
    assert apart == Layout(dp=2, ep=2, tp=2, zero=1, micro=2) and str(apart) == "tp=2 dp=2 ep=2 zero=1 micro=2"
    assert apart.keys()["mesh"]["ep"] == 2 and "ep" not in found.keys()["mesh"]
    for text, told in (("tp=x", "no value of tp"), ("xx=1", "no 'xx'"), ("tp=3,dp=2", "= 6 ranks, expected 8")):
        with pytest.raises(ValueError, match=told):
            changed(start, text, 8)


def test_best_notes_only_what_can_win() -> None:
    best = Best(1)
    for seconds, num_bytes in ((2.0, 10.0), (1.0, 20.0), (1.5, 5.0), (1.4, 30.0)):
        best.take(Estimate(seconds, num_bytes, Layout()))
    assert [one.seconds for one in best.fastest] == [1.0]
    assert [one.seconds for one in best.front] == [1.0, 1.5]
