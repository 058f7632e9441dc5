"""What ZeRO leaves on each rank, by the formula; and weights that are whole only while they are used."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitp.comm import Group, make_mesh, run_threads
from mpitp.layers.gathered import GatheredWeights, deal_weights, gathered_layers
from mpitp.layers.partition import piece_of
from mpitp.layers.site import make_site
from mpitp.models import CausalLM, abstract_model, build_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import InBuckets, Reduction
from mpitp.train.step import TrainStep
from tests.models.model_cases import CONFIGS, make_batch
from tests.sharded import fill

NAME = "llama 9/3"


def make(world: Group, mesh: dict[str, int], zero: int) -> tuple[CausalLM, Reduction]:
    model = build_model(CONFIGS[NAME], make_site(make_mesh(world, mesh)))
    if zero == 3:
        deal_weights(model.layers, model.site.mesh)
    fill(model.named_params(), std=0.2)
    return model, WithDealtWeights(model) if zero == 3 else InBuckets(model, zero)


def held_bytes(world: Group, mesh: dict[str, int], zero: int) -> tuple[int, int, int]:
    """Of weights, gradients and optimizer state, after the gradients of a step have come."""
    model, reduction = make(world, mesh, zero)
    optimizer = AdamW(reduction.params, AdamWSettings())
    step = TrainStep(model, optimizer, reduction=reduction)
    step.accumulate([make_batch(model.config, 2)])
    own = {id(param): param for _, param in [*model.named_params(), *reduction.params]}
    gradients = sum(param.grad.nbytes for param in own.values() if param.grad is not None)
    moments = sum(array.nbytes for pair in optimizer.moments.values() for array in pair)
    return sum(param.data.nbytes for _, param in model.named_params()), gradients, moments


def formula(world: Group, mesh: dict[str, int]) -> tuple[int, int]:
    """Bytes of all of this rank's parameters, and of its rows of them."""
    site = make_site(make_mesh(world, mesh))
    shapes = [param.placement.shape for _, param in abstract_model(CONFIGS[NAME], site).named_params()]
    dp = site.mesh["dp"]
    rows = [len(piece_of(shape[0], dp.rank, dp.size)) for shape in shapes]
    dealt = sum(count * math.prod(shape[1:]) for count, shape in zip(rows, shapes, strict=True))
    return 4 * sum(map(math.prod, shapes)), 4 * dealt


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_bytes_of_a_rank(mesh: dict[str, int], zero: int) -> None:
    ranks = math.prod(mesh.values())
    found, expected = run_threads(ranks, held_bytes, mesh, zero), run_threads(ranks, formula, mesh)
    for (weights, gradients, moments), (whole, rows) in zip(found, expected, strict=True):
        assert weights == (rows if zero == 3 else whole)
        assert gradients == (rows if zero else whole)
        assert moments == 2 * (rows if zero else whole)
    if len(mesh) == 1:
        assert sum(rows for _, rows in expected) == expected[0][0]


def most_whole(world: Group) -> tuple[int, int]:
    """The most layers whose weights were whole, or on their way, while one ran; and after the step."""
    model, reduction = make(world, {"dp": 2}, 3)
    layers, counts = gathered_layers(model.layers), []
    shares = {id(p): p.data.shape for _, p in model.named_params()}

    def is_whole(layer: GatheredWeights) -> bool:
        return bool(layer._coming) or any(d.param.data.shape != shares[id(d.param)] for d in layer.dealt)

    for layer in layers:
        for phase in ("forward", "backward"):
            original = getattr(layer.inner, phase)

            def shown(*args: object, original: object = original) -> object:
                counts.append(sum(map(is_whole, layers)))
                return original(*args)  # type: ignore[operator]

            setattr(layer.inner, phase, shown)
    TrainStep(model, AdamW(reduction.params, AdamWSettings()), reduction=reduction)([make_batch(model.config)], 1e-3)
    return max(counts), sum(map(is_whole, layers))


def test_no_more_than_two_layers_are_whole() -> None:
    assert run_threads(2, most_whole) == [(2, 0)] * 2


def stale(world: Group) -> bool:
    """Whether weights that were gathered ahead of an update are used after it."""
    model, reduction = make(world, {"dp": 2}, 3)
    layer = gathered_layers(model.layers)[0]
    layer.start()
    for dealt in layer.dealt:
        dealt.param.data[...] = 7.0
    reduction.updated()
    seen = []
    inner = layer.inner.forward
    layer.inner.forward = lambda *args: (seen.append(layer.dealt[0].param.data.copy()), inner(*args))[1]  # type: ignore[method-assign]
    layer.forward(np.array([1, 2]))
    return bool((seen[0] != 7.0).any())


def test_weights_gathered_before_an_update_are_not_used_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_threads(2, stale) == [False, False]
    monkeypatch.setattr(GatheredWeights, "drop", lambda self: None)  # a test of the test
    assert run_threads(2, stale) == [True, True]
