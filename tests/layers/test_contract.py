"""The contract that every layer keeps, one table over all of them, on NumPy and on the stand-in for CuPy alike."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import array_module, to_host
from mpitp.backend.device import CpuDevice, Device
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.build import Builder
from mpitp.layers.site import make_site
from tests import strict_cupy
from tests.layers.layer_cases import CASES, LayerCase, Rig, global_gradient, global_input, local, make_rig
from tests.layers.test_parallel_equals_dense import one_rank, run_layer
from tests.sharded import StrictDevice, assert_close

DEVICES: dict[str, Device] = {"numpy": CpuDevice(), "strict": StrictDevice()}
RANKS = [1, 3]

pytestmark = [pytest.mark.parametrize("name", CASES), pytest.mark.parametrize("device", DEVICES)]


@dataclasses.dataclass
class Bench:
    """A layer on one rank with two microbatches of local inputs and gradients."""

    case: LayerCase
    builder: Builder
    rig: Rig
    xs: list[Any]
    dys: list[Any]

    @classmethod
    def of(cls, group: Group, name: str, device: str, dtype: str = "float64") -> Bench:
        case = CASES[name]
        builder = Builder(make_site(group, device=DEVICES[device], dtype=dtype), 0.02)
        rig = make_rig(case, builder)
        xs = [local(global_input(case, f"x{i}"), rig.columns_in, builder) for i in range(2)]
        dys = [local(global_gradient(case, f"dy{i}"), rig.columns_out, builder) for i in range(2)]
        return cls(case, builder, rig, xs, dys)

    def take_grads(self) -> dict[str, np.ndarray]:
        """The gradients, which are then forgotten."""
        grads = {name: to_host(param.grad) for name, param in self.rig.params.items()}
        for param in self.rig.params.values():
            param.grad = None
        return grads


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or np.array_equal(to_host(a), to_host(b), equal_nan=True)


def arrays_in(value: Any) -> Iterator[Any]:
    """All arrays in a context."""
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from arrays_in(getattr(value, each.name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from arrays_in(each)
    elif hasattr(value, "dtype"):
        yield value


def forward_twice(group: Group, name: str, device: str) -> None:
    bench = Bench.of(group, name, device)
    first, _ = bench.rig.forward(bench.xs[0])
    first = to_host(first).copy()
    bench.rig.forward(bench.xs[1])
    assert same(bench.rig.forward(bench.xs[0])[0], first)


@pytest.mark.parametrize("ranks", RANKS)
def test_forward_twice_is_equal(name: str, device: str, ranks: int) -> None:
    run_threads(ranks, forward_twice, name, device)


def any_order(group: Group, name: str, device: str) -> None:
    bench = Bench.of(group, name, device)
    rig, (a, b), (da, db) = bench.rig, bench.xs, bench.dys
    alone = []
    for x, dy in ((a, da), (b, db)):
        dx = rig.backward(dy, rig.forward(x)[1])
        alone.append((None if dx is None else to_host(dx).copy(), bench.take_grads()))
    for order in ((0, 1), (1, 0)):
        ctxs = [rig.forward(a)[1], rig.forward(b)[1]]
        for i in order:
            assert same(rig.backward((da, db)[i], ctxs[i]), alone[i][0]), f"dx of microbatch {i} in order {order}"
        expected = {key: grad + alone[1][1][key] for key, grad in alone[0][1].items()}
        assert_close(bench.take_grads(), expected, 1e-14)


@pytest.mark.parametrize("ranks", RANKS)
def test_backward_in_any_order_and_gradients_add_up(name: str, device: str, ranks: int) -> None:
    run_threads(ranks, any_order, name, device)


def pickled_context(group: Group, name: str, device: str) -> None:
    bench = Bench.of(group, name, device)
    _, ctx = bench.rig.forward(bench.xs[0])
    stored = pickle.dumps(ctx)
    dx = bench.rig.backward(bench.dys[0], ctx)
    dx, grads = None if dx is None else to_host(dx).copy(), bench.take_grads()
    assert same(bench.rig.backward(bench.dys[0], pickle.loads(stored)), dx)
    assert_close(bench.take_grads(), grads, 0.0)


@pytest.mark.parametrize("ranks", RANKS)
def test_context_can_be_pickled(name: str, device: str, ranks: int) -> None:
    run_threads(ranks, pickled_context, name, device)


def inputs_stay(group: Group, name: str, device: str) -> None:
    bench = Bench.of(group, name, device)
    x, dy = bench.xs[0], bench.dys[0]
    _, ctx = bench.rig.forward(x)
    before = copy.deepcopy([x, dy, ctx, [param.data for param in bench.rig.params.values()]])
    bench.rig.backward(dy, ctx)
    after = [x, dy, ctx, [param.data for param in bench.rig.params.values()]]
    assert all(same(a, b) for a, b in zip(arrays_in(before), arrays_in(after), strict=True))
    assert same(x, local(global_input(bench.case, "x0"), bench.rig.columns_in, bench.builder))


@pytest.mark.parametrize("ranks", RANKS)
def test_inputs_context_and_weights_are_not_written_to(name: str, device: str, ranks: int) -> None:
    run_threads(ranks, inputs_stay, name, device)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_and_array_module_are_kept(name: str, device: str, dtype: str) -> None:
    bench = Bench.of(SerialGroup(), name, device, dtype)
    y, ctx = bench.rig.forward(bench.xs[0])
    dx = bench.rig.backward(bench.dys[0], ctx)
    grads = [param.grad for param in bench.rig.params.values()]
    for array in [y, *arrays_in(ctx), *grads, *([] if bench.rig.reads_ids else [dx])]:
        assert array.dtype in (dtype, np.int64)
        assert array_module(array) is bench.builder.site.device.xp
    assert y.dtype == dtype and (dx is None or dx.dtype == dtype)


def test_same_numbers_on_every_device(name: str, device: str) -> None:
    for result in run_threads(2, run_layer, name, "float64", 0, DEVICES[device]):
        assert_close(result, one_rank(name), 1e-12)


def test_nothing_is_fetched_from_the_device(name: str, device: str) -> None:
    """A transfer waits for all that is queued; only the backward of a lookup reads its ids (to add rows in order)."""
    bench = Bench.of(SerialGroup(), name, device)
    strict_cupy.transfers.reset()
    _, ctx = bench.rig.forward(bench.xs[0])
    assert strict_cupy.transfers.to_host == 0
    bench.rig.backward(bench.dys[0], ctx)
    assert strict_cupy.transfers.to_host == (1 if bench.rig.looks_up and device == "strict" else 0)
