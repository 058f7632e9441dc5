"""A convolution cut in three ways over any number of ranks gives what it gives on one: z, dx, dW, db."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.backend.device import CpuDevice, Device
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.comm.group import Pending
from mpitp.comm.observed import Call, GroupObserver, ObservedGroup
from mpitp.errors import ConfigError, PlacementError
from mpitp.layers import ArrayType, Builder, Layer, make_site
from mpitp.layers.halo import Halo
from mpitp.layers.layer import BACKWARD, FORWARD, typed_layers
from mpitp.layers.partition import split_evenly
from mpitp.ops.convolution import Geometry
from mpitp.optim.grad_sync import sync_gradients
from tests.ops.test_convolution import written_out
from tests.sharded import StrictDevice, assert_close, assert_same_bits, fill, gradients, random_array

IMAGES, CHANNELS, OUTPUTS = 2, 5, 7
GEOMETRIES = {
    "same": Geometry(6, 4, 3, padding=1),
    "strided": Geometry(9, 5, 3, stride=2, padding=1),
    "wide": Geometry(5, 5, 5, padding=2),  # a halo from several ranks
    "narrowing": Geometry(8, 3, 3),
    "patches": Geometry(6, 6, 3, stride=3),
}
WAYS = {"outputs": (None, -1), "inputs": (-1, None), "rows": (1, 1)}  # the dim of x and of z that is cut
RANKS = [2, 3, 4, 5, 7]


def make(builder: Builder, way: str, geometry: Geometry) -> Layer:
    if way == "outputs":
        layer: Layer = builder.convolution_by_outputs(geometry, CHANNELS, builder.site.share(OUTPUTS))
    elif way == "inputs":
        layer = builder.convolution_by_inputs(geometry, builder.site.share(CHANNELS), OUTPUTS)
    else:
        layer = builder.convolution_by_rows(geometry, CHANNELS, OUTPUTS)
    fill(layer.params().items())
    return layer


def whole(geometry: Geometry, name: str) -> np.ndarray:
    sizes = (geometry.height, geometry.width, CHANNELS) if name == "x" else (*geometry.outputs, OUTPUTS)
    return random_array(name, (IMAGES, *sizes))


def local(array: np.ndarray, dim: int | None, builder: Builder) -> Any:
    """This rank's piece."""
    if dim is not None:
        own = builder.site.share(array.shape[dim]).span
        array = np.take(array, range(own.start, own.stop), axis=dim)
    return from_host(np.ascontiguousarray(array, builder.site.dtype), builder.site.device.xp)


def joined(group: Group, mine: Any, dim: int | None) -> np.ndarray:
    """The whole, of every rank's piece; what is on all ranks must be the same."""
    pieces = group.all_gather_objects(to_host(mine).copy())
    if dim is not None:
        return np.concatenate(pieces, axis=dim)
    for piece in pieces:
        np.testing.assert_array_equal(piece, pieces[0])
    return pieces[0]


def run(
    group: Group, way: str, name: str, dtype: str = "float64", blocks: int = 0, device: Device | None = None
) -> dict[str, np.ndarray]:
    """One pass: global z, dx and gradients."""
    geometry, (cut_in, cut_out) = GEOMETRIES[name], WAYS[way]
    builder = Builder(make_site(group, dtype=dtype, invariant_blocks=blocks, device=device), 0.1)
    layer = make(builder, way, geometry)
    z, ctx = layer.forward(local(whole(geometry, "x"), cut_in, builder))
    dx = layer.backward(local(whole(geometry, "dz"), cut_out, builder), pickle.loads(pickle.dumps(ctx)))
    sync_gradients(layer.params().values(), builder.site.mesh)
    return {"z": joined(group, z, cut_out), "dx": joined(group, dx, cut_in), **gradients(group, layer.params().items())}


@cache
def one_rank(way: str, name: str) -> dict[str, np.ndarray]:
    return run(SerialGroup(), way, name)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("way", WAYS)
def test_one_rank_is_the_sum_written_out(way: str, name: str) -> None:
    geometry = GEOMETRIES[name]
    layer = make(Builder(make_site(SerialGroup(), dtype="float64"), 0.1), way, geometry)
    params, x, dz = layer.params(), whole(geometry, "x"), whole(geometry, "dz")
    found = one_rank(way, name)
    expected = written_out(x, params["weight"].data, geometry)
    np.testing.assert_allclose(found["z"], expected + params["bias"].data, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["bias/"], dz.sum(axis=(0, 1, 2)), rtol=0, atol=1e-12)
    w, dw = random_array("w", params["weight"].data.shape), found["weight/"]
    left, right = (written_out(x, w, geometry) * dz).sum(), (dw * w).sum()  # z is linear in W, and in x
    assert abs(left - right) < 1e-11 * np.abs(dw * w).sum()
    y = random_array("y", x.shape)
    left, right = (written_out(y, params["weight"].data, geometry) * dz).sum(), (found["dx"] * y).sum()
    assert abs(left - right) < 1e-11 * np.abs(found["dx"] * y).sum()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("way", WAYS)
def test_equals_one_rank(way: str, name: str, ranks: int) -> None:
    for result in run_threads(ranks, run, way, name):
        assert_close(result, one_rank(way, name), 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_float32_differs_by_rounding_and_stays_on_its_device(way: str) -> None:
    for device in (CpuDevice(), StrictDevice()):
        for result in run_threads(3, run, way, "strided", "float32", 0, device):
            assert {array.dtype for array in result.values()} == {np.dtype("float32")}
            assert_close(result, one_rank(way, "strided"), 2e-6)


@pytest.mark.parametrize("way", ["outputs", "inputs"])
def test_invariant_bits_are_those_of_one_rank(way: str) -> None:
    expected = run(SerialGroup(), way, "same", "float32", 5)
    assert_close(expected, one_rank(way, "same"), 2e-6)
    for ranks in (2, 3, 4, 5):
        for result in run_threads(ranks, run, way, "same", "float32", 5):
            assert_same_bits(result, expected)


def test_rows_have_no_invariant_mode() -> None:
    builder = Builder(make_site(SerialGroup(), invariant_blocks=2), 0.1)
    with pytest.raises(ConfigError, match="cut it by channels"):
        builder.convolution_by_rows(GEOMETRIES["same"], 2, 2)


def test_every_pixel_that_a_rank_sees_comes_from_one_rank() -> None:
    for geometry in GEOMETRIES.values():
        for ranks in range(1, 12):
            halos = [Halo(FakeGroup(rank, ranks), geometry) for rank in range(ranks)]
            for halo in halos:
                me = halo.group.rank
                rows = [row for owner in range(ranks) for row in halo.shared(owner, me)]
                assert rows == list(halo.near(me))
            assert [row for halo in halos for row in halo.outputs(halo.group.rank)] == list(range(geometry.outputs[0]))


def test_windows_inside_see_own_rows_alone_and_all_others_do_not() -> None:
    for geometry in GEOMETRIES.values():
        for ranks in range(1, 12):
            for rank in range(ranks):
                halo = Halo(FakeGroup(rank, ranks), geometry)
                own, inner = set(halo.own(rank)), halo.inner(rank)
                for row in halo.outputs(rank):
                    seen = set(geometry.seen(range(row, row + 1)))
                    assert (row in inner) == (seen <= own and bool(seen)), (geometry, ranks, rank, row)


def early_products(group: Group, name: str) -> tuple[list[str], int]:
    """Products and waits of a forward pass in their order; rows of windows inside."""
    geometry, builder, order = GEOMETRIES[name], Builder(make_site(group, dtype="float64"), 0.1), list[str]()
    layer = make(builder, "rows", geometry)
    compute, start = layer._compute, Halo.start_forward

    def started(halo: Halo, x: np.ndarray) -> tuple[np.ndarray, Pending]:
        near, coming = start(halo, x)
        return near, Pending(lambda: (order.append("wait"), coming.wait())[1])

    def computed(rows: range, *rest: Any) -> None:
        order.extend(["product"] * bool(rows))
        compute(rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_compute", computed)
        patch.setattr(Halo, "start_forward", started)
        layer.forward(local(whole(geometry, "x"), WAYS["rows"][0], builder))
    return order, len(layer.halo.inner(group.rank))


def test_the_halo_comes_behind_the_windows_inside() -> None:
    order, inner = run_threads(1, early_products, "same")[0]
    assert inner == GEOMETRIES["same"].outputs[0] and order == ["product", "wait"]


class FakeGroup:
    """A rank and a size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Counter(GroupObserver):
    """Bytes of every kind of call in a pass."""

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}

    def around_collective(self, call: Call, arrays: Any, group: Any, run: Callable[[], Any]) -> Any:
        op = call.op.removeprefix("start ")
        if not op.startswith("wait"):
            self.sent.setdefault("all_reduce sum" if op == "all_reduce" else op, []).extend(x.nbytes for x in arrays)
        return run()


def traffic(group: Group, way: str, name: str) -> None:
    counter, geometry, (cut_in, cut_out) = Counter(), GEOMETRIES[name], WAYS[way]
    builder = Builder(make_site(ObservedGroup(group, counter), dtype="float64"), 0.1)
    layer = make(builder, way, geometry)
    _, ctx = layer.forward(local(whole(geometry, "x"), cut_in, builder))
    passes = {FORWARD: counter.sent}
    counter.sent = {}
    layer.backward(local(whole(geometry, "dz"), cut_out, builder), ctx)
    passes[BACKWARD] = counter.sent
    expected: dict[str, dict[str, list[int]]] = {FORWARD: {}, BACKWARD: {}}
    for send in layer.sends():
        expected[send.phase].setdefault(send.op, []).append(send.width * IMAGES * 8)
    for phase, sent in passes.items():
        assert {op: sorted(sizes) for op, sizes in sent.items()} == {
            op: sorted(sizes) for op, sizes in expected[phase].items()
        }


@pytest.mark.parametrize("way", WAYS)
def test_sends_what_it_says(way: str) -> None:
    for name in ("same", "wide"):
        for ranks in (2, 3, 5):
            run_threads(ranks, traffic, way, name)


def types_of(group: Group, ways: str, letter: str) -> str:
    """Of two convolutions, one behind the other."""
    geometry, builder = GEOMETRIES["same"], Builder(make_site(group), 0.1)
    layers = {}
    for i, way in enumerate(ways.split()):
        if way == "outputs":
            layers[f"conv{i}"] = builder.convolution_by_outputs(geometry, CHANNELS, builder.site.share(OUTPUTS))
        elif way == "inputs":
            layers[f"conv{i}"] = builder.convolution_by_inputs(geometry, builder.site.share(OUTPUTS), CHANNELS)
        else:
            layers[f"conv{i}"] = builder.convolution_by_rows(geometry, CHANNELS, CHANNELS)
    typed = typed_layers(layers, ArrayType.of(("tp",), tp=letter))
    return typed[f"conv{len(layers) - 1}"].outgoing.along("tp")


def test_types() -> None:
    assert run_threads(3, types_of, "outputs inputs", "I") == ["I"] * 3
    assert run_threads(3, types_of, "rows rows", "V") == ["V"] * 3


@pytest.mark.parametrize(
    ("ways", "letter", "said"),
    [
        ("outputs outputs", "I", "conv1: .*must be I .invariant. along tp, found V"),
        ("inputs", "I", "each rank needs its own channels"),
        ("inputs", "V", "must be cut as"),
        ("rows", "I", "each rank needs its own rows"),
        ("rows inputs", "V", "conv1: .*must be cut as"),
    ],
)
def test_what_does_not_fit_is_refused(ways: str, letter: str, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        run_threads(2, types_of, ways, letter)


def test_images_of_another_size_are_refused() -> None:
    for way, sizes in (("outputs", (6, 4, 4)), ("inputs", (6, 5, 5)), ("rows", (5, 4, 5))):
        layer = make(Builder(make_site(SerialGroup()), 0.1), way, GEOMETRIES["same"])
        with pytest.raises(ConfigError, match=r"got an array of shape \[1, .*expected \[images, 6, 4, 5\]"):
            layer.forward(np.zeros((1, *sizes), np.float32))


def test_rows_are_dealt_as_everything_is() -> None:
    assert [Halo(FakeGroup(r, 3), GEOMETRIES["narrowing"]).own(r) for r in range(3)] == list(split_evenly(8, 3))
