"""What every op is held to, on any array module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import array_module, from_host, to_host

Array = Any


def strided(host: np.ndarray, xp: Any) -> Array:
    """The same values as a view of columns in the middle of a wider array."""
    wide = np.full((*host.shape[:-1], host.shape[-1] + 5), 7.0, dtype=host.dtype)
    wide[..., 2:-3] = host
    return from_host(wide, xp)[..., 2:-3]


def check_gradients(
    forward: Callable[..., Array], backward: Callable[..., Sequence[Array]], inputs: Sequence[np.ndarray], xp: Any
) -> None:
    """Each gradient of sum(dy * forward(*inputs)) against the central difference along random directions (float64).

    `forward(*inputs)` gives one array, `backward(dy, *inputs)` a gradient for each input. Both get arrays of `xp`, and
    must leave them as they were.
    """
    rng = np.random.default_rng(1)
    device = [from_host(x.copy(), xp) for x in inputs]
    y = to_host(forward(*device))
    dy = rng.standard_normal(y.shape)
    device_dy = from_host(dy.copy(), xp)
    grads = [to_host(g) for g in backward(device_dy, *device)]
    for before, after in zip([*inputs, dy], [*device, device_dy], strict=True):
        np.testing.assert_array_equal(to_host(after), before, "an input was written to")
    step = 1e-6
    for i, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
        assert grad.shape == x.shape and grad.dtype == np.float64
        for _ in range(3):
            direction = rng.standard_normal(x.shape)
            difference = 0.0
            for sign in (1.0, -1.0):
                moved = [from_host(v if j != i else v + sign * step * direction, xp) for j, v in enumerate(inputs)]
                difference += sign * float((to_host(forward(*moved)) * dy).sum())
            expected, got = difference / (2 * step), float((grad * direction).sum())
            scale = float(np.abs(grad * direction).sum()) + 1e-3
            assert abs(got - expected) <= 1e-7 * scale, f"input {i}: {got} against {expected}"


def assert_like(result: Array, dtype: Any, xp: Any) -> None:
    """The array module and the dtype that a result must have."""
    assert array_module(result) is xp
    assert result.dtype == dtype


def assert_rounding_close(got: Array, expected: np.ndarray, factor: float = 8.0) -> None:
    """Equal up to rounding in the dtype of `got`, relative to the largest value."""
    got = to_host(got)
    tolerance = factor * np.finfo(got.dtype).eps * (np.abs(expected).max(initial=0.0) + 1e-30)
    np.testing.assert_allclose(got, expected, rtol=factor * np.finfo(got.dtype).eps, atol=tolerance)
