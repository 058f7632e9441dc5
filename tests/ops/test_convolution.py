"""Convolution against its sum written out, pixel by pixel; gradients; and where windows lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.errors import ConfigError
from mpitp.ops.convolution import Geometry, fold, unfold
from tests.ops.checks import assert_like, check_gradients

GEOMETRIES = [
    Geometry(5, 4, 3, padding=1),
    Geometry(7, 6, 3, stride=2),
    Geometry(6, 5, 2, stride=3, padding=1),
    Geometry(4, 4, 1),
    Geometry(3, 2, 5, padding=3),
    Geometry(8, 8, 4, stride=4),
]


def written_out(x: np.ndarray, w: np.ndarray, geometry: Geometry) -> np.ndarray:
    """z[b, i, j, n] = sum over c, m, n of x[b, i s - p + m, j s - p + n, c] W[n, c, m, n]."""
    s, p, k = geometry.stride, geometry.padding, geometry.kernel
    padded = np.pad(x, ((0, 0), (p, p), (p, p), (0, 0)))
    z = np.zeros((len(x), *geometry.outputs, len(w)))
    for i, j in np.ndindex(geometry.outputs):
        z[:, i, j] = np.einsum("bmnc,ocmn->bo", padded[:, i * s : i * s + k, j * s : j * s + k], w)
    return z


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_equals_the_sum_written_out(geometry: Geometry, xp: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, geometry.height, geometry.width, 3))
    w = rng.standard_normal((4, 3, geometry.kernel, geometry.kernel))
    seen = unfold(from_host(x.copy(), xp), geometry.windows())
    assert_like(seen, x.dtype, xp)
    z = (to_host(seen) @ w.reshape(4, -1).T).reshape(2, *geometry.outputs, 4)
    np.testing.assert_allclose(z, written_out(x, w, geometry), rtol=0, atol=1e-13)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_fold_is_the_adjoint(geometry: Geometry, xp: Any) -> None:
    x = np.random.default_rng(2).standard_normal((2, geometry.height, geometry.width, 3))

    def backward(dseen: Any, x: Any) -> list[Any]:
        return [fold(dseen, geometry.windows(), out=x.copy())]

    check_gradients(lambda x: unfold(x, geometry.windows()), backward, [x], xp)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_some_rows_of_windows_see_only_their_rows(geometry: Geometry) -> None:
    x = np.random.default_rng(3).standard_normal((2, geometry.height, geometry.width, 1))
    rows, columns = geometry.outputs
    whole = unfold(x, geometry.windows()).reshape(2, rows, columns, -1)
    for start in range(rows + 1):
        for stop in range(start, rows + 1):
            near = geometry.seen(range(start, stop))
            part = unfold(x[:, near.start : near.stop], geometry.windows(range(start, stop)))
            np.testing.assert_array_equal(
                part.reshape(2, stop - start, columns, geometry.kernel**2), whole[:, start:stop]
            )


@pytest.mark.parametrize(
    "sizes", [(5, 5, 6), (5, 5, 0), (2, 9, 5, 1, 1), (5, 5, 3, 0), (5, 5, 3, 1, -1)], ids=lambda sizes: str(sizes)
)
def test_without_a_window_it_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"images of {sizes[0]} x {sizes[1]} with kernel={sizes[2]}.* has no window"):
        Geometry(*sizes)
