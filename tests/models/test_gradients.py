"""The gradient of the whole model's loss against finite differences, its accumulation, and its norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import ConfigError, NumericError
from mpitp.layers.passes import DropoutState
from mpitp.models import Batch, CausalLM
from mpitp.optim.grad_norm import GradNorm, clip_scale
from mpitp.train.step import TrainStep, evaluate
from tests.models.model_cases import CONFIGS, make_batch, make_model, make_optimizer
from tests.sharded import assert_close, gradients, random_array

STEP = 1e-6  # the error falls with its square: 5e-9 is left, rounding included


def move(model: CausalLM, name: str, by: float) -> None:
    """Add `by` times a random global direction to one parameter."""
    param = dict(model.named_params())[name]
    for part, place in param.placement.places():
        whole = random_array(f"direction {name}/{part.name}", part.shape)
        param.data[place] += by * whole[part.index]


def slopes(group: Group, name: str, dropout: bool) -> dict[str, tuple[float, float]]:
    """Of every parameter: the loss's slope along a random direction, by central difference and by the gradient."""
    model = make_model(group, CONFIGS[name])
    batch = make_batch(model.config, 2, DropoutState(3, 1) if dropout else None, samples=(8, 2))
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0)
    grads = gradients(group, model.named_params())
    result = {}
    for param_name, _ in list(model.named_params()):
        move(model, param_name, STEP)
        above = model.loss_forward(batch)[0]
        move(model, param_name, -2 * STEP)
        below = model.loss_forward(batch)[0]
        move(model, param_name, STEP)
        own = {key: grad for key, grad in grads.items() if key.rpartition("/")[0] == param_name}
        slope = sum(float((grad * random_array(f"direction {key}", grad.shape)).sum()) for key, grad in own.items())
        result[param_name] = ((above - below) / (2 * STEP), slope)
    return result


@pytest.mark.parametrize(("ranks", "dropout"), [(1, False), (3, True)])
@pytest.mark.parametrize("name", ["gpt2", "llama 9/3", "llama biases, tied, 5/1, llama3", "qwen2 6/2, tied"])
def test_finite_differences(name: str, ranks: int, dropout: bool) -> None:
    found = run_threads(ranks, slopes, name, dropout)[0]
    assert len(found) > 10
    wrong = {key: pair for key, pair in found.items() if not abs(pair[0] - pair[1]) <= 3e-8 * (1 + abs(pair[0]))}
    assert wrong == {}


def one_and_four(group: Group, name: str) -> None:
    model = make_model(group, CONFIGS[name])
    step = TrainStep(model, make_optimizer(model))
    found = []
    for cut in ((4,), (1, 1, 1, 1), (1, 3)):
        firsts = np.cumsum((0, *cut))
        batches = [
            make_batch(model.config, n, DropoutState(1, 2), int(first), samples=range(first, first + n))
            for first, n in zip(firsts, cut, strict=False)
        ]
        assert len({batch.num_targets / len(batch.tokens) for batch in batches}) == len(batches), "unequal weights"
        loss, tokens = step.accumulate(batches)
        assert tokens == sum(batch.num_targets for batch in batches)
        found.append({"loss": loss} | gradients(group, model.named_params()))
        model.zero_grad()
    for other in found[1:]:
        assert_close(other, found[0], 1e-14)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama biases, tied, 5/1, llama3"])
def test_accumulation_over_microbatches_changes_nothing(name: str, ranks: int) -> None:
    """Dropout masks and unequal numbers of counted targets included."""
    run_threads(ranks, one_and_four, name)


def norm_counts_once(group: Group, name: str) -> float:
    model = make_model(group, CONFIGS[name])
    TrainStep(model, make_optimizer(model)).accumulate([make_batch(model.config)])
    grads = gradients(group, model.named_params())
    expected = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    found = GradNorm(model.named_params(), group)()
    assert abs(found - expected) <= 1e-13 * expected
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", ["gpt2", "llama 9/3", "llama biases, tied, 5/1, llama3", "llama 8/2, linear"])
def test_norm_counts_each_element_once(name: str, ranks: int) -> None:
    assert len(set(run_threads(ranks, norm_counts_once, name))) == 1


def test_norm_of_gradients_that_are_missing_or_not_finite() -> None:
    model = make_model(SerialGroup(), CONFIGS["llama 9/3"])
    norm = GradNorm(model.named_params(), SerialGroup())
    assert norm() == 0.0
    param = dict(model.named_params())["final_norm.weight"]
    param.grad = np.full(8, 3.0)
    assert norm() == pytest.approx(3 * 8**0.5)
    for bad in (np.nan, np.inf, -np.inf):
        param.grad = np.array([1.0] * 7 + [bad])
        assert np.isnan(norm())


def clipped_gradients(group: Group, clip_norm: float) -> dict[str, Any]:
    model = make_model(group, CONFIGS["llama 9/3"])
    optimizer, seen = make_optimizer(model), []
    optimizer.step = lambda lr, grad_scale: seen.append((lr, grad_scale))  # type: ignore[method-assign]
    norm = TrainStep(model, optimizer, clip_norm)([make_batch(model.config)], 0.25).grad_norm
    assert len(seen) == 1 and seen[0][0] == 0.25
    scaled = {key: grad * seen[0][1] for key, grad in gradients(group, model.named_params()).items()}
    return {"norm": norm, "clipped": np.sqrt(sum((grad**2).sum() for grad in scaled.values()))}


@pytest.mark.parametrize("ranks", [1, 4])
def test_clipping(ranks: int) -> None:
    for found in run_threads(ranks, clipped_gradients, 0.01):
        assert found["norm"] > 0.1 and found["clipped"] == pytest.approx(0.01, rel=1e-4)
    for clip_norm in (0.0, 1e3):
        for found in run_threads(ranks, clipped_gradients, clip_norm):
            assert found["clipped"] == pytest.approx(found["norm"], rel=1e-12)


def test_clip_scale() -> None:
    assert clip_scale(5.0, 0.0) == clip_scale(0.5, 1.0) == clip_scale(0.0, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)


def nan_on_last_rank(group: Group, name: str) -> None:
    model = make_model(group, CONFIGS[name])
    step = TrainStep(model, make_optimizer(model))
    if group.rank == group.size - 1:
        dict(model.named_params())["blocks.1.mlp.down.weight"].data[0, 0] = np.nan
    before = [param.data.copy() for _, param in model.named_params()]
    with pytest.raises(NumericError, match="nan.* at step 1: .* weights are as they were"):
        step([make_batch(model.config)], 1e-3)
    for old, (_, param) in zip(before, model.named_params(), strict=True):
        np.testing.assert_array_equal(param.data, old)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_loss_that_is_not_a_number_stops_every_rank_and_updates_nothing(name: str, ranks: int) -> None:
    run_threads(ranks, nan_on_last_rank, name)


def test_steps_need_targets() -> None:
    model = make_model(SerialGroup(), CONFIGS["gpt2"])
    with pytest.raises(ConfigError, match="without a single target"):
        TrainStep(model, make_optimizer(model))([Batch.of_rows([[1, 2]], [[-1, -1]])], 1e-3)
    with pytest.raises(ConfigError, match="a loss needs targets"):
        model.loss_forward(Batch.of_rows([[1, 2]]))
    for batches in ([], [Batch.of_rows([[1, 2]], [[-1, -1]])]):
        with pytest.raises(ConfigError, match="evaluation without a single target"):
            evaluate(model, batches)


def test_evaluation_is_the_mean_over_all_targets() -> None:
    model = make_model(SerialGroup(), CONFIGS["gpt2"])
    batches = [make_batch(model.config, 1), make_batch(model.config, 2, first=5)]
    losses = [model.loss_forward(batch)[0] for batch in batches]
    assert evaluate(model, batches) == pytest.approx(sum(losses) / sum(batch.num_targets for batch in batches))
    assert all(param.grad is None for _, param in model.named_params())
