"""A stand-in for CuPy that runs on the CPU and is stricter than CuPy: use it as the array module of a test.

Its arrays hold their values privately. What CuPy refuses raises here too: conversion by NumPy (`np.asarray(x)`),
arithmetic with NumPy arrays, functions and arguments that CuPy lacks (`where=` of ufuncs and reductions, `max` of an
empty array). So does what CuPy does in silence at the price of a wait for the device, or with undefined results:
`float(x)`, `if x:`, `for value in x` over one dimension, `x[mask]` (its shape is not known on the host), NumPy
functions on device arrays, writing through an index array with repeats, `matmul` into an operand. New memory is filled
with NaN, so that reading it before writing shows.

`asnumpy` and `asarray` are the only ways between host and device; `transfers` counts them.

Every function and method here takes arguments in the places and by the names that CuPy gives them, or fewer:
tests/backend/test_cupy_names.py compares them with CuPy's own where that is installed.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy import (  # noqa: F401  the dtypes and constants that CuPy shares with NumPy
    bool_,
    dtype,
    finfo,
    float16,
    float32,
    float64,
    iinfo,
    inf,
    int8,
    int32,
    int64,
    nan,
    newaxis,
    pi,
    promote_types,
    uint8,
    uint16,
    uint32,
    uint64,
)

GARBAGE = 0x5A  # every byte of new integer memory


@dataclass
class Transfers:
    """How many arrays went from the device to the host, and back, and how often a stream was waited for."""

    to_host: int = 0
    to_device: int = 0
    synchronized: int = 0

    def reset(self) -> None:
        self.to_host = self.to_device = self.synchronized = 0


transfers = Transfers()


class ndarray:
    """An array on the pretended device."""

    __slots__ = ("_values",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    # what the host may know without waiting
    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    nbytes = property(lambda self: self._values.nbytes)
    itemsize = property(lambda self: self._values.itemsize)
    strides = property(lambda self: self._values.strides)
    flags = property(lambda self: self._values.flags)
    T = property(lambda self: ndarray(self._values.T))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"device array {self.shape} {self.dtype}\n{self._values!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ndarray, (self._values.copy(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> ndarray:
        return self.copy()

    # what would move values to the host in silence
    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("implicit conversion of a device array to the host; use to_host")

    __array__ = __bool__ = __float__ = __int__ = __complex__ = __index__ = __contains__ = _refuse
    __array_function__ = item = tolist = _refuse

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> ndarray:
        """NumPy hands over `numpy_scalar * device_array`; all else is a NumPy function called on a device array."""
        if method != "__call__" or kwargs or not builtins.any(isinstance(x, np.generic) for x in inputs):
            raise TypeError(f"numpy.{ufunc.__name__} called on a device array")
        return _elementwise(ufunc, *inputs)

    def __iter__(self) -> Iterator[ndarray]:
        if self.ndim < 2:
            raise TypeError("iteration over the elements of a device array")
        return (self[i] for i in range(len(self)))

    # indexing
    def __getitem__(self, key: Any) -> ndarray:
        key = _index(key)
        if builtins.any(isinstance(k, np.ndarray) and k.dtype == np.bool_ for k in key):
            raise TypeError("the shape of x[mask] is not known on the host; use where")
        return ndarray(self._values[key if _is_advanced(key) else (*key, ...) if Ellipsis not in key else key])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _index(key)
        _refuse_repeats(key)
        self._values[key] = _unwrap(value)

    # methods that are functions of the module as well
    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True) -> ndarray:
        return ndarray(self._values.astype(dtype, order=order, copy=copy))

    def copy(self, order: str = "C") -> ndarray:
        return ndarray(self._values.copy(order))

    def fill(self, value: Any) -> None:
        self._values.fill(_unwrap(value))

    def view(self, dtype: Any = None) -> ndarray:
        return ndarray(self._values.view() if dtype is None else self._values.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        return ndarray(self._values.reshape(*shape))

    def ravel(self) -> ndarray:
        return ndarray(self._values.ravel())

    def flatten(self) -> ndarray:
        return ndarray(self._values.flatten())

    def transpose(self, *axes: Any) -> ndarray:
        return ndarray(self._values.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return ndarray(self._values.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> ndarray:
        return ndarray(self._values.squeeze(axis))

    def get(self) -> np.ndarray:
        return asnumpy(self)


def _unwrap(x: Any) -> Any:
    """The values behind a device array; scalars pass; host arrays are refused."""
    if isinstance(x, ndarray):
        return x._values
    if x is None or isinstance(x, (bool, int, float, np.generic)):
        return x
    raise TypeError(f"Unsupported type {type(x)}")


def _wrap(values: Any) -> ndarray:
    return ndarray(np.asarray(values))


def _index(key: Any) -> tuple[Any, ...]:
    """A key as a tuple of what may be in one: whole numbers, slices, None, Ellipsis and device arrays."""
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if not isinstance(part, (int, np.integer, slice, ndarray)) and part is not None and part is not Ellipsis:
            raise TypeError(f"a device array can't be indexed by {type(part)}")
        if isinstance(part, slice) and isinstance(part.start, ndarray) | isinstance(part.stop, ndarray):
            raise TypeError("a slice's bounds must be on the host")
    return tuple(part._values if isinstance(part, ndarray) else part for part in parts)


def _is_advanced(key: tuple[Any, ...]) -> bool:
    return builtins.any(isinstance(part, np.ndarray) for part in key)


def _refuse_repeats(key: tuple[Any, ...]) -> None:
    """On a device, several writes to one element race."""
    arrays = [part for part in key if isinstance(part, np.ndarray) and part.dtype != np.bool_]
    if arrays:
        places = np.stack([x.ravel() for x in np.broadcast_arrays(*arrays)])
        if np.unique(places, axis=1).shape[1] != places.shape[1]:
            raise ValueError("an index array with repeats: which write comes last is undefined")


def _declared(parameters: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the parameters that CuPy has: any other is a TypeError."""
    signature = inspect.signature(eval(f"lambda {parameters}: None", {"float64": float64}))

    def call(*args: Any, **options: Any) -> Any:
        signature.bind(*args, **options)
        return function(*args, **options)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _elementwise(function: np.ufunc, *inputs: Any, out: ndarray | None = None, dtype: Any = None) -> ndarray:
    values = [_unwrap(x) for x in inputs]
    options = {} if dtype is None else {"dtype": dtype}
    if out is None:
        return _wrap(function(*values, **options))
    if not isinstance(out, ndarray):
        raise TypeError("out must be a device array")
    function(*values, out=out._values, **options)
    return out


def _operators() -> None:
    """Arithmetic, comparison and in-place operators of the array class."""
    names = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul lt le eq ne gt ge".split()
    ufuncs = (
        "add subtract multiply true_divide floor_divide remainder power bitwise_and bitwise_or bitwise_xor left_shift "
        "right_shift matmul less less_equal equal not_equal greater greater_equal"
    ).split()
    for name, ufunc_name in zip(names, ufuncs, strict=True):
        ufunc = getattr(np, ufunc_name)
        setattr(ndarray, f"__{name}__", lambda self, other, f=ufunc: _elementwise(f, self, other))
        if names.index(name) <= names.index("matmul"):
            setattr(ndarray, f"__r{name}__", lambda self, other, f=ufunc: _elementwise(f, other, self))
        if names.index(name) < names.index("matmul"):
            setattr(ndarray, f"__i{name}__", lambda self, other, f=ufunc: _elementwise(f, self, other, out=self))
    for name in ("neg", "pos", "abs", "invert"):
        function = getattr(operator, name)
        setattr(ndarray, f"__{name}__", lambda self, f=function: _wrap(f(self._values)))


def _ufuncs() -> None:
    """Elementwise functions: positional inputs, `out` and `dtype`; no `where`."""
    unary = (
        "abs absolute exp expm1 log log1p sqrt square reciprocal negative sign tanh sin cos rint floor ceil "
        "isfinite isnan isinf"
    )
    binary = (
        "add subtract multiply divide true_divide floor_divide remainder power minimum maximum equal not_equal less "
        "less_equal greater greater_equal logical_and logical_or "
        "bitwise_and bitwise_or bitwise_xor left_shift right_shift"
    )
    for inputs, names in (("x, /", f"{unary} logical_not"), ("x1, x2, /", binary)):
        for name in names.split():
            function = partial(_elementwise, getattr(np, name))
            globals()[name] = _declared(f"{inputs}, *, out=None, dtype=None", function)


# Reductions and their parameters behind the array, of the function and of the method.
_PLAIN, _TYPED = "axis=None, out=None, keepdims=False", "axis=None, dtype=None, out=None, keepdims=False"
_REDUCTIONS = {
    **dict.fromkeys(("sum", "mean", "prod"), (_TYPED, _TYPED)),
    **dict.fromkeys(("any", "all", "max", "min"), (_PLAIN, _PLAIN)),
    **dict.fromkeys(("argmax", "argmin"), (_TYPED, "axis=None, out=None, dtype=None, keepdims=False")),
    "cumsum": ("axis=None, dtype=None, out=None", "axis=None, dtype=None, out=None"),
}


def _reductions() -> None:
    """Reductions, as functions and as methods; the result stays on the device, 0-dimensional if need be."""
    for name, (of_function, of_method) in _REDUCTIONS.items():
        function = getattr(np, name)
        if name in ("max", "min", "argmax", "argmin"):
            function = _refuse_empty(function)
        globals()[name] = _declared(f"a, {of_function}", _reduction(function, of_function))
        setattr(ndarray, name, _declared(f"self, {of_method}", _reduction(function, of_method)))


def _refuse_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(values: np.ndarray, **options: Any) -> Any:
        if values.size == 0:
            raise ValueError("zero-size array to reduction operation which has no identity")
        return function(values, **options)

    return checked


def _reduction(function: Callable[..., Any], parameters: str) -> Callable[..., Any]:
    names = [parameter.partition("=")[0] for parameter in parameters.split(", ")]

    def reduce(a: ndarray, *args: Any, **options: Any) -> ndarray:
        options |= dict(zip(names, args, strict=False))
        if options.get("dtype", ...) is None:
            del options["dtype"]
        out = options.pop("out", None)
        result = function(_values(a), **options, **({} if out is None else {"out": out._values}))
        return _wrap(result) if out is None else out

    return reduce


def _values(a: Any) -> np.ndarray:
    if not isinstance(a, ndarray):
        raise TypeError(f"expected a device array, got {type(a)}")
    return a._values


_RESHUFFLES = {
    "reshape": "a, newshape, order='C'",
    "transpose": "a, axes=None",
    "swapaxes": "a, axis1, axis2",
    "moveaxis": "a, source, destination",
    "expand_dims": "a, axis",
    "squeeze": "a, axis=None",
    "broadcast_to": "array, shape",
    "ravel": "a, order='C'",
    "triu": "m, k=0",
    "tril": "m, k=0",
    "sort": "a, axis=-1",
    "argsort": "a, axis=-1",
    "argpartition": "a, kth, axis=-1",
    "partition": "a, kth, axis=-1",
    "repeat": "a, repeats, axis=None",
    "tile": "A, reps",
    "flip": "a, axis=None",
    "roll": "a, shift, axis=None",
    "clip": "a, a_min, a_max",
    "diff": "a, n=1, axis=-1",
}


def _reshuffles() -> None:
    """Functions of one array (then plain options) that return an array."""
    for name, parameters in _RESHUFFLES.items():
        function = getattr(np, name)
        globals()[name] = _declared(
            parameters, lambda a, *args, f=function, **options: _wrap(f(_values(a), *args, **options))
        )


def _fills() -> None:
    """Functions that make an array of a shape."""
    for name in ("zeros", "ones"):
        function = getattr(np, name)
        globals()[name] = _declared(
            "shape, dtype=float64, order='C'",
            lambda shape, dtype=np.float64, order="C", f=function: ndarray(f(shape, dtype, order)),
        )
        globals()[f"{name}_like"] = _declared(
            "a, dtype=None", lambda a, dtype=None, f=function: ndarray(f(a.shape, dtype or a.dtype))
        )


def empty(shape: Any, dtype: Any = np.float64, order: str = "C") -> ndarray:
    values = np.empty(shape, dtype, order)
    if values.dtype.kind in "fV":  # bfloat16 is of kind V
        values[...] = np.nan
    else:
        values.view(np.uint8)[...] = GARBAGE & (1 if values.dtype == np.bool_ else 0xFF)
    return ndarray(values)


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    return empty(prototype.shape, dtype or prototype.dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> ndarray:
    return ndarray(np.full(shape, _unwrap(fill_value), dtype))


def full_like(a: ndarray, fill_value: Any, dtype: Any = None) -> ndarray:
    return full(a.shape, fill_value, dtype or a.dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    start, stop = (0, start) if stop is None else (start, stop)
    return ndarray(np.arange(start, stop, step, dtype=dtype))


def eye(N: int, M: int | None = None, k: int = 0, dtype: Any = np.float64) -> ndarray:
    return ndarray(np.eye(N, M, k, dtype=dtype))


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    return _wrap(np.where(_values(condition), _unwrap(x), _unwrap(y)))


def matmul(a: ndarray, b: ndarray, /, *, out: ndarray | None = None) -> ndarray:
    if out is not None and builtins.any(np.shares_memory(_values(out), _values(x)) for x in (a, b)):
        raise ValueError("matmul into one of its operands")
    return _elementwise(np.matmul, a, b, out=out)


def dot(a: ndarray, b: ndarray) -> ndarray:
    return _wrap(np.dot(_values(a), _values(b)))


def einsum(subscripts: str, /, *operands: ndarray) -> ndarray:
    return _wrap(np.einsum(subscripts, *(_values(x) for x in operands)))


def outer(a: ndarray, b: ndarray) -> ndarray:
    return _wrap(np.outer(_values(a), _values(b)))


def concatenate(tup: Any, axis: int = 0) -> ndarray:
    return _wrap(np.concatenate([_values(x) for x in tup], axis))


def stack(tup: Any, axis: int = 0) -> ndarray:
    return _wrap(np.stack([_values(x) for x in tup], axis))


def split(ary: ndarray, indices_or_sections: Any, axis: int = 0) -> list[ndarray]:
    return [ndarray(part) for part in np.split(_values(ary), indices_or_sections, axis)]


def take(a: ndarray, indices: ndarray, axis: int | None = None) -> ndarray:
    return _wrap(np.take(_values(a), _unwrap(indices), axis))


def take_along_axis(a: ndarray, indices: ndarray, axis: int) -> ndarray:
    return _wrap(np.take_along_axis(_values(a), _values(indices), axis))


def searchsorted(a: ndarray, v: ndarray, side: str = "left") -> ndarray:
    return _wrap(np.searchsorted(_values(a), _values(v), side))


def copyto(dst: ndarray, src: Any, *, where: ndarray | None = None) -> None:
    np.copyto(_values(dst), _unwrap(src), where=True if where is None else _values(where))


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(np.ascontiguousarray(_values(a), dtype))


def shares_memory(a: ndarray, b: ndarray) -> bool:
    return np.shares_memory(_values(a), _values(b))


may_share_memory = shares_memory


def asarray(a: Any, dtype: Any = None) -> ndarray:
    """A device array itself; a host array, list or number copied to the device."""
    if isinstance(a, ndarray):
        return a if dtype is None else a.astype(dtype, copy=False)
    transfers.to_device += 1
    return ndarray(np.array(a, dtype=dtype, order="C"))


def array(obj: Any, dtype: Any = None) -> ndarray:
    """A copy, of a device array too."""
    return asarray(obj, dtype).copy() if isinstance(obj, ndarray) else asarray(obj, dtype)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: np.ndarray | None = None) -> np.ndarray:
    """A copy in host memory."""
    transfers.to_host += 1
    if out is None:
        return np.array(_values(a), order=order)
    out[...] = _values(a)
    return out


class _Stream:
    def synchronize(self) -> None:
        transfers.synchronized += 1


_stream = _Stream()
cuda = SimpleNamespace(get_current_stream=lambda: _stream)

_operators()
_ufuncs()
_reductions()
_reshuffles()
_fills()
