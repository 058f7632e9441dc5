"""A result's bits depend on the values and on the length of a row alone: not on where and beside what the row lies."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from mpitp.backend.accelerator import use_accelerator
from mpitp.ops.adamw import AdamWRule, adamw_update, sum_of_squares
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward
from mpitp.ops.cross_entropy import exp_sums
from mpitp.ops.gelu import gelu_backward, gelu_forward
from mpitp.ops.layer_norm import layer_norm_backward, layer_norm_forward
from mpitp.ops.rms_norm import rms_norm_backward, rms_norm_forward
from mpitp.ops.rope import rope_forward
from mpitp.ops.swiglu import split_columns, swiglu_backward, swiglu_forward

DTYPES = [np.float32, np.float64]
LENGTHS = range(1, 71)


@pytest.fixture(autouse=True)
def always(accelerated):
    """Every test here is about compiled kernels."""


def some(rng, *shape, dtype=np.float32):
    return (rng.standard_normal(shape) * 3).astype(dtype)


def views(x):
    """The same matrix where rows touch, with gaps between rows at an odd place, and as every other row."""
    wide = np.full((x.shape[0], x.shape[1] + 7), 5, x.dtype)
    wide[:, 3:-4] = x
    double = np.full((2 * x.shape[0], x.shape[1]), 5, x.dtype)
    double[::2] = x
    return x.copy(), wide[:, 3:-4], double[::2]


def same(a, b):
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def cuts(width):
    """Columns start .. stop - 1 of all lengths, at aligned and odd places."""
    for n in LENGTHS:
        for start in (0, 1, 5, width - n):
            yield slice(start, start + n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_by_columns(rng, dtype):
    x, dy = some(rng, 3, 150, dtype=dtype), some(rng, 3, 150, dtype=dtype)
    y, dx = gelu_forward(x), gelu_backward(dy, x)
    gate_up = some(rng, 3, 300, dtype=dtype)
    gate, up = split_columns(gate_up)
    z, dgate, dup = swiglu_forward(gate_up), *split_columns(swiglu_backward(dy, gate_up))
    for cut in cuts(150):
        assert same(gelu_forward(x[:, cut]), y[:, cut])
        assert same(gelu_backward(dy[:, cut], x[:, cut]), dx[:, cut])
        part = np.concatenate([gate[:, cut], up[:, cut]], axis=1)
        assert same(swiglu_forward(part), z[:, cut])
        grads = split_columns(swiglu_backward(dy[:, cut], part))
        assert same(grads[0], dgate[:, cut]) and same(grads[1], dup[:, cut])


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_by_elements(rng, dtype):
    def update(arrays):
        param, grad, m, v = (x.copy() for x in arrays)
        rule = AdamWRule(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
        adamw_update(param, grad, m, np.abs(v), rule, grad_scale=0.7)
        return param

    arrays = [some(rng, 200, dtype=dtype) for _ in range(4)]
    whole = update(arrays)
    for cut in cuts(200):
        assert same(update([x[cut] for x in arrays]), whole[cut])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [1, 3, 16, 33])
def test_rotations_by_heads(rng, dtype, half):
    x, cos, sin = (
        some(rng, 5, 6, 2 * half, dtype=dtype),
        some(rng, 5, half, dtype=dtype),
        some(rng, 5, half, dtype=dtype),
    )
    whole = rope_forward(x, cos, sin)
    for head in range(6):
        for view in views(x[:, head]):
            assert same(rope_forward(view[:, None], cos, sin)[:, 0], whole[:, head])
    in_place = x.copy()
    assert same(rope_forward(in_place[:, 1:4], cos, sin, out=in_place[:, 1:4]), whole[:, 1:4])
    assert same(in_place[:, 4:], x[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_norms_and_softmax(rng, dtype):
    for h in [*LENGTHS, 512, 700]:
        x, dy, weight, bias = (some(rng, *shape, dtype=dtype) for shape in ((4, h), (4, h), (h,), (h,)))

        def outputs(x, dy, weight=weight, bias=bias):
            y, mean, rstd = layer_norm_forward(x, weight, bias, 1e-5)
            z, scale = rms_norm_forward(x, weight, 1e-5)
            layer = layer_norm_backward(dy, x, weight, mean, rstd)[0]
            root = rms_norm_backward(dy, x, weight, scale)[0]
            e, sums = exp_sums(x, x.max(axis=1), [range(x.shape[1])])
            return y, mean, rstd, z, scale, layer, root, e, sums[0]

        whole = outputs(x, dy)
        for view, dview in zip(views(x), views(dy), strict=True):
            assert all(same(a, b) for a, b in zip(outputs(view, dview), whole, strict=True))
        for i in range(4):
            row = outputs(x[i : i + 1], dy[i : i + 1])
            assert all(same(a[0], b[i]) for a, b in zip(row, whole, strict=True)), f"row {i} of width {h}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_share_the_logits(rng, dtype):
    logits = some(rng, 4, 300, dtype=dtype)
    greatest = logits.max(axis=1)
    for cut in cuts(300):
        e, sums = exp_sums(logits[:, cut], greatest, [range(cut.stop - cut.start)])
        whole, of_blocks = exp_sums(logits, greatest, [range(cut.start, cut.stop)])
        assert same(e, whole[:, cut]) and same(sums, of_blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s", [2, 33, 96, 97, 200])
def test_heads(rng, dtype, s):
    q, k, v, do = (some(rng, s, 3, 16, dtype=dtype) for _ in range(4))

    def outputs(q, k, v, do):
        heads = q.shape[1]
        o, lse = attention_forward(q, k, v, HeadMap(range(heads), 0.25))
        return (
            o,
            lse.T,
            *attention_backward(do, Kept(q, k, v, o, lse), HeadMap(range(heads), 0.25, range(heads), heads)),
        )

    whole = outputs(q, k, v, do)
    for head in range(3):
        alone = outputs(*(np.ascontiguousarray(x[:, head : head + 1]) for x in (q, k, v, do)))
        assert all(same(a[:, 0], b[:, head]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_of_views(rng, dtype):
    for n in [*LENGTHS, 1000]:
        x = some(rng, 5, n, dtype=dtype)
        values = {float(sum_of_squares(view)) for view in views(x)}
        assert len(values) == 1
        np.testing.assert_allclose(values.pop(), (x.astype(np.float64) ** 2).sum(), rtol=1e-14)


def test_plain_and_compiled_adamw_agree_to_the_bit(rng):
    """No sums and no exponential in it: the same operations in the same order."""
    results = []
    for compiled in (False, True):
        use_accelerator(compiled)
        arrays = [x.copy() for x in np.abs(some(np.random.default_rng(3), 4, 1001))]
        adamw_update(*arrays, AdamWRule(0.1, 0.9, 0.95, 1e-8, 0.1, step=3), grad_scale=0.7)
        results.append(arrays)
    assert all(same(a, b) for a, b in zip(*results, strict=True))
