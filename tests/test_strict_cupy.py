"""The stand-in for CuPy refuses what would pass on a CPU and fail, stall or differ on a GPU."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from mpitp.backend.arrays import array_module, from_host, to_host
from tests import strict_cupy as cp

X = cp.asarray(np.arange(6.0).reshape(2, 3))
HOST = np.ones((2, 3))

REFUSED = {
    "np.asarray": lambda: np.asarray(X),
    "a NumPy function": lambda: np.exp(X),
    "a NumPy reduction": lambda: np.sum(X),
    "adding a NumPy array": lambda: X + HOST,
    "adding to a NumPy array": lambda: HOST + X,
    "a NumPy argument": lambda: cp.exp(HOST),
    "a NumPy operand of matmul": lambda: cp.matmul(X, HOST.T),
    "copying into a NumPy array": lambda: np.copyto(HOST, X),
    "assigning a NumPy array": lambda: X.__setitem__(..., HOST),
    "float()": lambda: float(X.sum()),
    "int()": lambda: int(X.sum()),
    "if": lambda: bool(X.sum() > 0),
    "as an index": lambda: [1, 2][X[0, 0]],
    "as a slice's bound": lambda: X[: X[0, 1]],
    "item()": lambda: X[0, 0].item(),
    "elements in a loop": lambda: list(X[0]),
    "x in": lambda: 1.0 in X,
    "a NumPy index": lambda: X[np.array([0])],
    "a list as index": lambda: X[[0, 1]],
    "a mask whose result has an unknown shape": lambda: X[X > 1],
    "where= of a ufunc": lambda: cp.exp(X, where=X > 1),
    "initial= of a reduction": lambda: X.max(initial=0.0),
    "dtype= of max": lambda: X.max(dtype=np.float64),
    "keepdims= of cumsum": lambda: X.cumsum(axis=0, keepdims=True),
    "a dtype as the third argument of eye": lambda: cp.eye(2, 2, np.float32),
    "kind= of argsort": lambda: cp.argsort(X, kind="stable"),
    "where by position in copyto": lambda: cp.copyto(X, 1.0, X > 1),
    "out= on the host": lambda: cp.exp(X, out=HOST),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_refuses(call):
    with pytest.raises(TypeError):
        call()


def test_refuses_races_and_overlap():
    x = X.copy()
    with pytest.raises(ValueError, match="repeats"):
        x[cp.asarray(np.array([0, 0]))] += 1.0
    square = x[:, :2]
    with pytest.raises(ValueError, match="operands"):
        cp.matmul(square, square, out=square)
    with pytest.raises(ValueError, match="zero-size"):
        x[:0].max(axis=1)


def test_stays_on_the_device_and_shares_memory_through_views():
    x = X.copy()
    assert array_module(x.sum()) is cp and x.sum().shape == ()
    x[0, 1][...] = 9.0
    x[1] *= 2.0
    x.reshape(6)[5:] = np.float32(7.0)
    np.testing.assert_array_equal(to_host(x), [[0, 9, 2], [6, 8, 7]])
    assert [row.shape for row in x] == [(3,), (3,)]
    assert (np.float32(2) * x).dtype == np.float64 and (2 * x.astype(np.float32)).dtype == np.float32


def test_array_copies_and_asarray_does_not():
    x = X.copy()
    assert cp.asarray(x) is x
    cp.array(x)[...] = 9.0
    np.testing.assert_array_equal(to_host(x), to_host(X))


def test_new_memory_is_garbage():
    assert np.isnan(to_host(cp.empty((3,), np.float32))).all()
    assert (to_host(cp.empty((3,), np.int64)) != 0).all()


def test_counts_transfers_and_copies_both_ways():
    cp.transfers.reset()
    host = np.zeros(3)
    x = from_host(host, cp)
    host[0] = 1.0
    back = to_host(x)
    back[1] = 1.0
    np.testing.assert_array_equal(to_host(x), 0.0)
    cp.cuda.get_current_stream().synchronize()
    assert cp.transfers == cp.Transfers(to_host=2, to_device=1, synchronized=1)


def test_pickles_and_copies():
    for clone in (pickle.loads(pickle.dumps(X)), copy.deepcopy(X)):
        np.testing.assert_array_equal(to_host(clone), to_host(X))
        assert not cp.shares_memory(clone, X)
