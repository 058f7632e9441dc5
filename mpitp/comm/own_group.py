"""A group of one's own in the place of the library's: loaded by its name, and compared with the library's before use.

    class Ring(ForwardingGroup):                       my/groups.py
        def all_reduce(self, x, op="sum", out=None): ...

    mpitp launch -n 4 -- bench allreduce --group my.groups:Ring
    mpitp launch -n 4 -- train run.toml --set mesh.group=my.groups:Ring

The class is made with the library's group as its only argument. All groups of the mesh are then such ones; files,
stopping and agreement stay with the library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.group import Group
from mpitp.errors import ConfigError, NumericError

Wrap = Callable[[Group], Group]
STARTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # what layers start and wait for
SHAPES = ((1003,), (7, 3), (1,), (0,))  # of the arrays that are compared
DTYPES = ("float32", "float64", "float16", "int64")


def load_group(name: str) -> Wrap:
    """What puts the class `module:Class`, or `path/to/file.py:Class`, around a group.

    Raises ConfigError for a module, file or class that isn't there, and for one that isn't a `Group`.
    """
    place, colon, class_name = name.rpartition(":")
    if not colon or not place or not class_name.isidentifier():
        raise ConfigError(f"a group of one's own is named as module:Class or path/to/file.py:Class, got {name!r}")
    found = getattr(_module(place, name), class_name, None)
    if not (isinstance(found, type) and issubclass(found, Group)):
        what = "has no such class" if found is None else f"is {found!r}"
        raise ConfigError(f"{name}: {what}; expected a subclass of Group, best of mpitp.comm.ForwardingGroup")
    refuse_unmakeable(found, name)
    _refuse_bypassed(found)
    make: Wrap = found

    def wrap(inner: Group) -> Group:
        made = make(inner)
        if (made.rank, made.size) != (inner.rank, inner.size):
            raise ConfigError(
                f"{name}: made with rank {inner.rank} of {inner.size}, it says rank {made.rank} of {made.size}; "
                "call super().__init__(inner)"
            )
        return made

    return wrap


def _module(place: str, name: str) -> ModuleType:
    try:
        return _module_of_file(Path(place)) if place.endswith(".py") else import_module(place)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError(
            f"{name}: {error}; a module must be installed or on PYTHONPATH on every host (the current folder isn't "
            "looked in), or name its file: path/to/file.py:Class"
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    label = f"mpitp_own_{path.stem}"
    spec = spec_from_file_location(label, path)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = module_from_spec(spec)
    sys.modules[label] = module  # dataclasses look there for what their annotations mean
    spec.loader.exec_module(module)
    return module


def refuse_unmakeable(kind: Any, name: str = "") -> None:
    """Raise ConfigError for a class that can't be made with the library's group alone; other callables may be any."""
    if not isinstance(kind, type):
        return
    label = name or kind.__name__
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(
            f"{label} lacks {', '.join(missing)}, which every Group has; derive it from mpitp.comm.ForwardingGroup, "
            "which hands on to the library's group what you don't write"
        )
    try:
        signature(kind).bind(None)
    except TypeError:
        raise ConfigError(
            f"{label} is made with the library's group as its only argument, but its __init__ takes {signature(kind)}; "
            "give the others defaults, or derive a class that calls super().__init__(inner, ...) with them"
        ) from None


def refuse_bypassed(group: Group) -> None:
    """Raise ConfigError where a class does a collective in its own way that layers would not call."""
    _refuse_bypassed(type(group))


def _refuse_bypassed(kind: type[Group]) -> None:
    """Layers start sums: a class that changes all_reduce alone must have them started by what calls it (`Group`'s)."""
    for op in STARTED:
        own, start = _definer(kind, op), _definer(kind, f"start_{op}")
        if start is not Group and own is not start and issubclass(own, start):
            raise ConfigError(
                f"{kind.__name__} does {op} in a way of its own ({own.__name__}), but layers call start_{op}, which "
                f"{start.__name__} does in another: yours would not be used. Derive it from ForwardingGroup, whose "
                f"started collectives go through the blocking ones, or write start_{op} too"
            )


def _definer(kind: type, name: str) -> type:
    """The class that a method comes from."""
    return next(each for each in kind.__mro__ if name in vars(each))


def check_group(wrap: Wrap, library: Group, name: str) -> None:
    """Compare what a group of one's own does with what the group does that it is put around; a collective.

    Whole numbers are added, so that results must be equal to the bit. Raises NumericError on all ranks, with the first
    difference.
    """
    own, found = wrap(library), list[str]()
    for shape in SHAPES:
        for dtype in DTYPES:
            found += _reductions(own, library, _whole_numbers(library.rank, shape, dtype), "sum")
    for shape in SHAPES[:2]:
        x = _whole_numbers(library.rank, shape, "float32")
        found += [*_reductions(own, library, x, "max"), *_reductions(own, library, x, "min"), *_others(own, library, x)]
    problem = next((text for text in found if text), "")  # every rank has called all of them
    told = [f"{text}, on rank {rank}" for rank, text in enumerate(library.all_gather_objects(problem)) if text]
    if told:
        raise NumericError(f"{name} doesn't do what the library's group does: {told[0]}; it is not used")


def _reductions(own: Group, library: Group, x: Array, op: str) -> Iterator[str]:
    """What is wrong with all_reduce ("" where nothing is): its result, started too, in x, in another; x left alone."""
    wanted, label = library.all_reduce(x.copy(), op), f"all_reduce({op}) of {x.dtype} {list(x.shape)}"
    given = x.copy()
    yield _difference(label, own.all_reduce(given, op), wanted)
    yield _difference(f"{label}: its argument afterwards", given, x)
    yield _difference(f"{label}, started", own.start_all_reduce(x.copy(), op).wait(), wanted)
    for target in (given, np.empty_like(x)):
        yield _difference(f"{label} with out", own.all_reduce(given, op, out=target), wanted)
        yield _difference(f"{label}: what is in out", target, wanted)
        given = x.copy()


def _others(own: Group, library: Group, x: Array) -> Iterator[str]:
    """What is wrong with the other collectives."""
    label, ranks = f"of {x.dtype} {list(x.shape)}", library.size
    yield _difference(f"all_gather {label}", own.start_all_gather(x.copy()).wait(), library.all_gather(x))
    sizes = [len(x) // ranks + (rank < len(x) % ranks) for rank in range(ranks)]
    wanted = library.reduce_scatter(x.copy(), sizes)
    yield _difference(f"reduce_scatter {label}", own.start_reduce_scatter(x.copy(), sizes).wait(), wanted)
    blocks = np.array_split(x, ranks)
    for got, want in zip(own.start_all_to_all(blocks).wait(), library.all_to_all(blocks), strict=True):
        yield _difference(f"all_to_all {label}", got, want)
    yield _difference(f"broadcast {label}", own.broadcast(x.copy()), library.broadcast(x.copy()))
    wanted = library.all_reduce_in_order([x.copy()], like=x)
    yield _difference(f"all_reduce_in_order {label}", own.all_reduce_in_order([x.copy()], like=x), wanted)


def _whole_numbers(rank: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Small ones, others on every rank: their sum is the same in any order, in any dtype."""
    return np.random.default_rng(rank).integers(-9, 10, shape).astype(dtype)


def _difference(what: str, got: Any, wanted: Array) -> str:
    if not isinstance(got, np.ndarray) or (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        kind = f"{got.dtype} {list(got.shape)}" if isinstance(got, np.ndarray) else repr(got)
        return f"{what} is {kind}, expected {wanted.dtype} {list(wanted.shape)}"
    wrong = np.argwhere(got != wanted)
    if not len(wrong):
        return ""
    at = tuple(map(int, wrong[0]))
    return f"{what} has {got[at]} at {list(at)}, expected {wanted[at]} ({len(wrong)} of {wanted.size} differ)"
