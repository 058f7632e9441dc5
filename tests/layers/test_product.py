"""A product of one's own, W = A B of low rank, in both parallel linears: product and pair know nothing of one another.

column-parallel   A [n/tp, r] is cut as W is,  B [r, k] is on every rank: its gradient is a summand along tp
row-parallel      B [r, k/tp] is cut as W is,  A [n, r] is on every rank: its gradient is a summand along tp
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import Array
from mpitp.comm import Group, SerialGroup, abstract_mesh, run_threads
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.errors import PlacementError
from mpitp.layers import (
    ColumnParallelLinear,
    CopyToTP,
    Cut,
    Layer,
    Param,
    Part,
    Placement,
    Product,
    ReduceFromTP,
    RowParallelLinear,
    Site,
    make_site,
    typed_layers,
)
from mpitp.layers.product import ALL, Block
from mpitp.optim.grad_sync import sync_gradients
from tests.sharded import fill

TOKENS, IN, OUT, RANK = 6, 7, 9, 3


@dataclass(frozen=True, slots=True)
class LowRankProduct(Product):
    """W [n, k] = A [n, r] B [r, k]. x W^T = (x B^T) A^T, so that no whole W is ever made."""

    a: Param
    b: Param
    whole: Placement  # how W is cut

    @property
    def shape(self) -> tuple[int, int]:
        return self.a.data.shape[0], self.b.data.shape[1]

    @property
    def placement(self) -> Placement:
        return self.whole

    def forward(self, x: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        return np.matmul(x @ self.b.data[:, cols].T, self.a.data[rows].T, out=out)

    def input_grad(self, dy: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        return np.matmul(dy @ self.a.data[rows], self.b.data[:, cols], out=out)

    def accumulate_grads(self, dy: Array, x: Array, blocks: Sequence[Block]) -> None:
        da, db = np.zeros_like(self.a.data), np.zeros_like(self.b.data)
        for rows, cols in blocks:
            da[rows] += dy[:, rows].T @ (x[:, cols] @ self.b.data[:, cols].T)
            db[:, cols] += (dy[:, rows] @ self.a.data[rows]).T @ x[:, cols]
        self.a.accumulate(da)
        self.b.accumulate(db)

    def params(self) -> Mapping[str, Param]:
        return {"a": self.a, "b": self.b}


def low_rank(site: Site, cuts: tuple[Cut, Cut], partial: Sequence[str] = ("tp",)) -> LowRankProduct:
    """W cut along one of its dims; the factor that isn't cut has a gradient that is partial along `partial`."""

    def factor(dims: tuple[Cut, Cut]) -> Param:
        is_cut = any(dim.axis for dim in dims)
        return site.param(site.placement([Part("", dims)], partial=() if is_cut else partial), std=1.0, decay=True)

    inner = Cut.whole(RANK)
    return LowRankProduct(factor((cuts[0], inner)), factor((inner, cuts[1])), site.placement([Part("", cuts)]))


def column(site: Site, **options: Any) -> ColumnParallelLinear:
    share = site.share(OUT)
    product = low_rank(site, (Cut.of(share), Cut.whole(IN)), **options)
    return ColumnParallelLinear(product, None, CopyToTP(site.summation()), share.local_blocks)


def row(site: Site, **options: Any) -> RowParallelLinear:
    share = site.share(IN)
    product = low_rank(site, (Cut.whole(OUT), Cut.of(share)), **options)
    return RowParallelLinear(product, None, ReduceFromTP(site.summation()), share.local_blocks)


LINEARS: dict[str, Callable[..., Any]] = {"column": column, "row": row}


class Counter(GroupObserver):
    """Writes down every collective."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        if not call.op.startswith("wait"):
            self.calls.append(call)
        return run()


def columns_of(kind: str, site: Site) -> tuple[slice, slice]:
    """The columns of x and of y that this rank has."""
    share = site.share(OUT if kind == "column" else IN)
    own = slice(share.span.start, share.span.stop)
    return (ALL, own) if kind == "column" else (own, ALL)


@pytest.mark.parametrize("blocks", [0, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", LINEARS)
def test_it_is_the_dense_product_of_one_rank(kind: str, ranks: int, blocks: int) -> None:
    random = np.random.default_rng(1)
    x, dy = random.standard_normal((TOKENS, IN)), random.standard_normal((TOKENS, OUT))
    alone = LINEARS[kind](make_site(SerialGroup(), dtype="float64"))
    fill(alone.params().items(), std=1.0)
    a, b = alone.product.a.data, alone.product.b.data
    w = a @ b
    dw = dy.T @ x
    expected = {"y": x @ w.T, "dx": dy @ w, "a": dw @ b.T, "b": a.T @ dw}

    def check(inner: Group) -> None:
        counter = Counter()
        group = ObservedGroup(inner, counter)
        site = make_site(group, dtype="float64", invariant_blocks=blocks)
        layer = LINEARS[kind](site)
        fill(layer.params().items(), std=1.0)
        own_in, own_out = columns_of(kind, site)
        counter.calls.clear()
        y, ctx = layer.forward(x[:, own_in])
        dx = layer.backward(dy[:, own_out], ctx)
        assert [call.shape for call in counter.calls] == [(TOKENS, IN) if kind == "column" else (TOKENS, OUT)]
        counter.calls.clear()
        params = layer.params()
        sync_gradients(params.values(), site.mesh)
        shared = {"column": "b", "row": "a"}[kind]
        assert [call.shape for call in counter.calls] == [params[shared].data.shape]
        np.testing.assert_allclose(y, expected["y"][:, own_out], rtol=0, atol=1e-12)
        np.testing.assert_allclose(dx, expected["dx"][:, own_in], rtol=0, atol=1e-12)
        for name, param in params.items():
            (part,) = param.placement.parts
            np.testing.assert_allclose(param.grad, expected[name][part.index], rtol=0, atol=1e-12, err_msg=name)

    run_threads(ranks, check)


@pytest.mark.parametrize("kind", LINEARS)
def test_the_sum_over_ranks_is_needed(kind: str) -> None:
    """What backward leaves of the factor that every rank holds is a summand, on several ranks other than the whole."""

    def summand(group: Group) -> tuple[np.ndarray, np.ndarray]:
        site = make_site(group, dtype="float64")
        layer = LINEARS[kind](site)
        fill(layer.params().items(), std=1.0)
        own_in, own_out = columns_of(kind, site)
        _, ctx = layer.forward(np.ones((TOKENS, IN))[:, own_in])
        layer.backward(np.ones((TOKENS, OUT))[:, own_out], ctx)
        shared = layer.params()["b" if kind == "column" else "a"]
        before = shared.grad.copy()
        sync_gradients([shared], site.mesh)
        return before, shared.grad

    results = run_threads(3, summand)
    for before, after in results:
        assert np.abs(before - after).max() > 1e-3
        np.testing.assert_allclose(after, sum(own for own, _ in results), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", LINEARS)
def test_types_refuse_a_factor_that_is_not_declared_partial(kind: str) -> None:
    site = make_site(abstract_mesh({"tp": 3})).abstract()
    shared = {"column": "b", "row": "a"}[kind]

    def types(**options: Any) -> dict[str, Any]:
        layers: dict[str, Layer] = {"linear": LINEARS[kind](site, **options)}
        incoming = site.batch_type
        if kind == "row":
            incoming = incoming.changed("tp", "V", (("", Cut.of(site.share(IN))),))
        return typed_layers(layers, incoming)

    assert str(types()["linear"].outgoing) == {"column": "V along tp", "row": "I along tp"}[kind]
    with pytest.raises(PlacementError, match=rf"linear: the gradient of {shared} is a summand along tp") as caught:
        types(partial=())
    assert "declare the parameter partial along tp" in str(caught.value)
