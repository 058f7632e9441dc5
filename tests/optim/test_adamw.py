"""AdamW over sharded parameters, and the learning-rate schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.param import Param
from mpitp.layers.placement import Cut, Part, Placement
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.schedule import Schedule
from tests.models.model_cases import CONFIGS, make_batch, make_model


def param_of(values: list[float], decay: bool = True) -> Param:
    return Param(np.array(values), Placement((Part("", (Cut.whole(len(values)),)),)), decay=decay)


def test_first_step_by_hand() -> None:
    """m / (1 - beta1) is the gradient and v / (1 - beta2) its square, so each weight moves by lr, after its decay."""
    param = param_of([1.0, -2.0, 3.0])
    optimizer = AdamW([("w", param)], AdamWSettings(eps=0.0, weight_decay=0.1))
    param.grad = np.array([0.5, -3.0, 1e-4])
    optimizer.step(0.01)
    expected = np.array([1.0, -2.0, 3.0]) * (1 - 0.01 * 0.1) - 0.01 * np.array([1, -1, 1])
    np.testing.assert_allclose(param.data, expected, rtol=1e-12)
    assert param.grad is None and optimizer.steps_done == 1


def test_ten_steps_against_the_formula() -> None:
    rng = np.random.default_rng(0)
    param = param_of(rng.standard_normal(9).tolist())
    w, m, v = param.data.copy(), np.zeros(9), np.zeros(9)
    optimizer = AdamW([("w", param)], AdamWSettings((0.8, 0.9), 1e-3, 0.2))
    for step in range(1, 11):
        grad = rng.standard_normal(9)
        param.grad = grad.copy()
        optimizer.step(0.1 / step, grad_scale=0.5)
        m, v = 0.8 * m + 0.2 * 0.5 * grad, 0.9 * v + 0.1 * (0.5 * grad) ** 2
        w = w * (1 - 0.1 / step * 0.2)
        w -= 0.1 / step * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-3)
    np.testing.assert_allclose(param.data, w, rtol=1e-12)


def test_what_has_no_decay_or_no_gradient() -> None:
    decayed, kept, idle = param_of([1.0]), param_of([1.0], decay=False), param_of([1.0])
    optimizer = AdamW([("a", decayed), ("b", kept), ("c", idle)], AdamWSettings(weight_decay=0.5))
    decayed.grad, kept.grad = np.zeros(1), np.zeros(1)
    optimizer.step(0.1)
    assert (decayed.data[0], kept.data[0], idle.data[0]) == (0.95, 1.0, 1.0)


def replicas(group: Group) -> list[tuple[str, bytes]]:
    model = make_model(group, CONFIGS["llama 9/3"], "float32")
    optimizer = AdamW(model.named_params(), AdamWSettings())
    for _ in range(20):
        loss, ctx = model.loss_forward(make_batch(model.config))
        model.loss_backward(ctx, 0.1)
        optimizer.step(1e-2)
    found = []
    for name, param in model.named_params():
        assert (optimizer.moments[name][0].shape, optimizer.moments[name][1].dtype) == (param.data.shape, np.float32)
        fused = param.placement.fused
        for part, place in param.placement.places():
            view = np.moveaxis(param.data[place], fused, 0)
            found += [(f"{name}/{part.name}/{row}", view[i].tobytes()) for i, row in enumerate(part.held[fused])]
    return [entry for entry in found if "norm" in entry[0] or "/k/" in entry[0] or "/v/" in entry[0]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_stay_equal_to_the_bit(ranks: int) -> None:
    """Norm weights, and KV heads that several ranks hold, after 20 steps in float32."""
    rows: dict[str, set[bytes]] = {}
    counts: dict[str, int] = {}
    for found in run_threads(ranks, replicas):
        for name, values in found:
            rows.setdefault(name, set()).add(values)
            counts[name] = counts.get(name, 0) + 1
    assert all(len(values) == 1 for values in rows.values())
    assert any(count > 1 for name, count in counts.items() if "/k/" in name), "some KV head is replicated"


def test_one_rank_counts_the_same_parameters() -> None:
    model = make_model(SerialGroup(), CONFIGS["gpt2"])
    optimizer = AdamW(model.named_params(), AdamWSettings())
    assert set(optimizer.moments) == {name for name, _ in model.named_params()}


def test_warmup_is_linear_and_ends_at_the_full_rate() -> None:
    schedule = Schedule(lr=1.0, steps=100, warmup_steps=10)
    assert [schedule.at(step) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert schedule.at(11) < 1.0


def test_cosine_ends_at_the_least_rate() -> None:
    schedule = Schedule(lr=1.0, steps=110, warmup_steps=10, min_lr=0.1)
    assert schedule.at(60) == pytest.approx(0.55)
    assert schedule.at(110) == pytest.approx(0.1) == schedule.at(500)
    rates = [schedule.at(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert schedule.at(35) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))


def test_constant_rate_and_short_runs() -> None:
    assert {Schedule(0.3, 50, kind="constant").at(step) for step in (1, 25, 50, 60)} == {0.3}
    assert Schedule(0.3, 50, 10, kind="constant").at(5) == pytest.approx(0.15)
    assert Schedule(1.0, 1).at(1) == 1.0, "a run of one step trains at the full rate"
    assert Schedule(1.0, 10, warmup_steps=10).at(10) == 1.0
