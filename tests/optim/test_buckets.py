"""Buckets start as soon as the last of their gradients is there, behind the backward that goes on, and not before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

import mpitp.optim.reduction as reduction_module
from mpitp.comm import Group, make_mesh, run_threads
from mpitp.layers import Layer, Param, make_site
from mpitp.models import CausalLM, build_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.buckets import Bucket, backward_order, plan_buckets
from mpitp.optim.reduction import InBuckets
from mpitp.train.step import TrainStep
from tests.models.model_cases import CONFIGS, make_batch
from tests.sharded import fill

TIED = "llama biases, tied, 5/1, llama3"
SMALL = 4096  # bytes: several buckets in these models


def test_a_shared_parameter_waits_for_its_first_layer() -> None:
    model = build_model(CONFIGS[TIED], make_site(run_threads(1, lambda group: group)[0]))
    order = backward_order(model.layers)
    assert [name for name, _ in order] == ["head", "final_norm", "blocks.1", "blocks.0", "embedding"]
    assert [len(params) for _, params in order][0] == 0 and order[-1][1] == [model["head"].params()["weight"]]


def test_buckets_are_filled_in_backward_s_order() -> None:
    model = build_model(CONFIGS["llama 9/3"], make_site(run_threads(1, lambda group: group)[0], dtype="float64"))
    order = backward_order(model.layers)
    kinds = {id(param): "all" for _, params in order for param in params}
    for limit in (1, 2000, SMALL, 1 << 30):
        plan = plan_buckets(order, kinds, limit)
        assert [p for _, params in plan for p in params] == [p for _, params in order for p in params]
        assert all(sum(p.data.nbytes for p in params) <= limit or len(params) == 1 for _, params in plan)
        for layer, params in plan:
            assert any(params[-1] is own for own in dict(order)[layer]), "waits for another layer than its last one's"
    assert len(plan) == 1 and plan[0][0] == "embedding"
    assert len({layer for layer, _ in plan_buckets(order, kinds, 1)}) == len(order)
    # what isn't alike doesn't share a bucket; what has no kind has none
    norm = order[1][1][0]
    assert plan_buckets(order, kinds | {id(norm): "other"}, 1 << 30)[1] == ("final_norm", [norm])
    assert plan_buckets(order, {id(norm): "only"}, 1 << 30) == [("final_norm", [norm])]


class Watched(InBuckets):
    """Notes the layers that are done, and for each bucket that starts, what goes in and when."""

    def __init__(self, model: CausalLM, zero: int) -> None:
        super().__init__(model, zero, SMALL)
        self.done = 0
        self.starts: list[tuple[int, dict[str, np.ndarray]]] = []  # layers done; gradient by parameter
        for bucket in self.buckets.buckets:
            WATCHES[id(bucket)] = self

    def layer_done(self, name: str) -> None:
        self.done += 1
        super().layer_done(name)

    def note(self, bucket: Bucket) -> None:
        self.starts.append((self.done, {s.name: s.param.grad_or_zeros().copy() for s in bucket.shards}))


WATCHES: dict[int, Watched] = {}


def starts_of(world: Group, zero: int, name: str) -> tuple[list[str], list[int], int]:
    """Of a step of two microbatches a rank: parameters whose bucket started with something else than the rank's whole
    gradient, the numbers of layers done when the buckets started, and the number of layers.
    """
    model = build_model(CONFIGS[name], make_site(make_mesh(world, {"dp": 2}), dtype="float64"))
    fill(model.named_params(), std=0.2)
    batches = [make_batch(model.config, 1, first=first + world.rank) for first in (0, 2)]
    watched = Watched(model, zero)
    step = TrainStep(model, AdamW(watched.params, AdamWSettings()), reduction=watched)
    tokens = step.accumulate(batches)[1]
    expected: dict[str, np.ndarray] = {}
    for number, batch in enumerate(batches):  # ZeRO-2 sends every microbatch's on its way
        model.zero_grad()
        model.loss_backward(model.loss_forward(batch)[1], 1.0 / tokens)
        for key, param in model.named_params():
            assert param.grad is not None
            own = f"{key} of {number}" if zero > 1 else key
            expected[own] = expected.get(own, 0) + param.grad
    found: dict[str, np.ndarray] = {}
    for _, grads in watched.starts:
        for key, grad in grads.items():
            found[f"{key} of {int(f'{key} of 0' in found)}" if zero > 1 else key] = grad
    assert set(found) == set(expected)
    wrong = [key for key in expected if not np.allclose(found[key], expected[key], rtol=1e-12, atol=1e-15)]
    return wrong, [done for done, _ in watched.starts], len(model.layers)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = Bucket.start

    def start(bucket: Bucket) -> None:
        WATCHES[id(bucket)].note(bucket)
        real(bucket)

    monkeypatch.setattr(Bucket, "start", start)
    yield
    WATCHES.clear()


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name", [TIED, "gpt2 untied"])
def test_a_bucket_starts_with_whole_gradients_and_before_backward_ends(name: str, zero: int) -> None:
    for wrong, done, layers in run_threads(2, starts_of, zero, name):
        assert wrong == []
        assert len(done) > 3 and done == sorted(done)
        first_round = 0 if zero > 1 else layers
        assert first_round < done[0] < done[-1] <= 2 * layers


@pytest.mark.usefixtures("noted")
def test_a_bucket_that_does_not_wait_for_the_second_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: a tied table's gradient taken for whole when the head is done."""

    def too_early(layers: Mapping[str, Layer]) -> list[tuple[str, list[Param]]]:
        order = backward_order(layers)
        return [("head", order[-1][1]), *order[1:-1], ("embedding", [])]

    monkeypatch.setattr(reduction_module, "backward_order", too_early)
    for wrong, _, _ in run_threads(2, starts_of, 0, TIED):
        assert wrong == ["embedding.weight"]
