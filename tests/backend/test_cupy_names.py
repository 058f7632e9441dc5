"""What the stand-in for CuPy offers, and what the device path asks for, exists in the real CuPy with the same meaning.

CuPy's wheel can be imported on a machine without a GPU, where signatures can be looked at but no array can be made.
Skipped where CuPy isn't installed: pip install cupy-cuda13x (or cupy-cuda12x).
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import strict_cupy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it finds no CUDA here
    cupy = pytest.importorskip("cupy", reason="CuPy isn't installed: its names are not compared with the stand-in's")

ROOT = Path(__file__).resolve().parents[2]
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
CONSTANTS = "bool_ dtype finfo float16 float32 float64 iinfo inf int8 int32 int64 nan newaxis pi promote_types uint8"
FUNCTIONS = sorted(
    name
    for name, value in vars(strict_cupy).items()
    if inspect.isfunction(value) and value.__module__ == strict_cupy.__name__ and not name.startswith("_")
)
METHODS = sorted(
    name for name, value in vars(strict_cupy.ndarray).items() if inspect.isfunction(value) and not name.startswith("_")
)
PROPERTIES = sorted(name for name, value in vars(strict_cupy.ndarray).items() if isinstance(value, property))
REFUSING = ("__array__", "__array_function__", "item", "tolist")  # where CuPy refuses too, or waits
NOT_OFFERED = {"item", "tolist"}
HOST_ARRAYS = {"counts.max(initial=0)"}  # calls of NumPy's methods in the midst of the device path
# CuPy gives these parameters older or other names than NumPy; the device path gives them by position.
OTHER_NAMES = {("newshape", "shape"), ("a", "x"), ("a", "arr"), ("tup", "arrays"), ("where", "condition")}


def signature_of(function: Any) -> Signature:
    """Of a function, a ufunc or a compiled method of CuPy: from Python, or from the first line of its documentation."""
    try:
        return inspect.signature(function)
    except ValueError:
        line = (function.__doc__ or "").partition("\n")[0].replace("\\", "")
        parameters = re.sub(r"\b\w+ (?=\w)", "", re.search(r"\((.*)\)", line)[1])  # without the types of C
        return inspect.signature(eval(f"lambda {parameters}: None"))


def contradictions(ours: Signature, theirs: Signature) -> Iterator[str]:
    """How calls that `ours` takes would be refused by `theirs`, or mean something else there."""
    there = list(theirs.parameters.values())
    swallows = next((i for i, one in enumerate(there) if one.kind is Parameter.VAR_POSITIONAL), len(there))
    for place, one in enumerate(ours.parameters.values()):
        same_place = there[place] if place < len(there) else None
        by_name = theirs.parameters.get(one.name)
        if one.kind is Parameter.VAR_POSITIONAL:
            if swallows > place:
                yield f"*{one.name} isn't taken"
        elif one.kind is Parameter.KEYWORD_ONLY:
            if by_name is None or by_name.kind not in BY_NAME:
                yield f"{one.name}= isn't taken"
        elif place < swallows and (same_place is None or same_place.kind not in BY_POSITION):
            yield f"no argument {place + 1} ({one.name})"
        elif one.kind is Parameter.POSITIONAL_OR_KEYWORD and same_place is not None and same_place.name != one.name:
            yield f"argument {place + 1} is {same_place.name}, not {one.name}"
        if by_name is not None and one.default is not Parameter.empty and not same_default(one, by_name):
            yield f"{one.name} is {by_name.default} by default, not {one.default}"


def same_default(ours: Parameter, theirs: Parameter) -> bool:
    if ours.name == "dtype" and ours.default is not None:
        return np.dtype(theirs.default) == np.dtype(ours.default)
    if ours.name == "keepdims":
        return bool(theirs.default) == bool(ours.default)
    return theirs.default == ours.default


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_stand_in(name: str) -> None:
    real = getattr(cupy, name)
    ours = inspect.signature(getattr(strict_cupy, name))
    assert list(contradictions(ours, signature_of(real))) == []
    if isinstance(real, cupy.ufunc):
        assert sum(one.kind is Parameter.POSITIONAL_ONLY for one in ours.parameters.values()) == real.nin
        assert real.nout == 1


@pytest.mark.parametrize("name", sorted(set(METHODS) - NOT_OFFERED))
def test_methods_of_the_stand_in(name: str) -> None:
    ours = inspect.signature(getattr(strict_cupy.ndarray, name))
    assert list(contradictions(ours, signature_of(getattr(cupy.ndarray, name)))) == []


def test_attributes_operators_and_constants() -> None:
    for name in (*PROPERTIES, *REFUSING):
        assert hasattr(cupy.ndarray, name), name
    operators = [name for name in vars(strict_cupy.ndarray) if re.fullmatch(r"__[a-z]+__", name)]
    lacking = [name for name in operators if not hasattr(cupy.ndarray, name)]
    assert len(operators) > 40 and set(lacking) <= {
        "__slots__",
        "__contains__",
        "__index__",
    }  # the last two only refuse
    for name in CONSTANTS.split():
        assert getattr(cupy, name) is getattr(np, name) or getattr(cupy, name) == getattr(np, name), name


class Call:
    """One call in the source of a function of the array module, or of a method that arrays have."""

    def __init__(self, path: Path, node: ast.Call) -> None:
        assert isinstance(node.func, ast.Attribute)
        self.name, self.node = node.func.attr, node
        self.label = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"

    def binds(self, function: Any, *first: Any) -> bool:
        """Whether a function takes this number of arguments and these names (and `first`, before them)."""
        if any(isinstance(one, ast.Starred) for one in self.node.args) or None in (k.arg for k in self.node.keywords):
            return True
        try:
            signature_of(function).bind(*first, *self.node.args, **{k.arg: k.value for k in self.node.keywords})
        except TypeError:
            return False
        return True

    def names(self, function: Any) -> list[str]:
        """What the parameters are called that the arguments by position go to, the first (an array) left out."""
        parameters = [one for one in signature_of(function).parameters.values() if one.kind in BY_POSITION]
        return [one.name for one in parameters[1 : len(self.node.args)]]


def is_array_module(path: Path, node: ast.expr) -> bool:
    """Whether an expression is the module of an array, by what this code base calls such modules."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith("array_module")
    last = ast.unparse(node).rpartition(".")[2]
    in_these = path.name in ("arrays.py", "buffers.py")
    return last in ("xp", "cupy", "_module") or (last == "module" and in_these)


def nodes(kind: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    for path in sorted((ROOT / "mpitp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path, node


def calls(belongs: Callable[[Path, ast.Attribute], bool]) -> list[Call]:
    return [
        Call(path, node)
        for path, node in nodes(ast.Call)
        if isinstance(node.func, ast.Attribute) and belongs(path, node.func)
    ]


def test_functions_that_the_device_path_calls() -> None:
    found = calls(lambda path, attribute: is_array_module(path, attribute.value))
    assert len(found) > 100
    assert [call.label for call in found if not hasattr(cupy, call.name)] == []
    assert [call.label for call in found if not call.binds(getattr(cupy, call.name))] == []
    assert [call.label for call in found if not hasattr(strict_cupy, call.name)] == []
    assert [call.label for call in found if not call.binds(getattr(strict_cupy, call.name))] == []
    assert [call.label for call in found if not means_the_same(call)] == []


def means_the_same(call: Call) -> bool:
    """Whether NumPy, where it tells, and CuPy call the parameters alike that the arguments by position go to."""
    try:
        theirs = call.names(getattr(np, call.name))
    except (AttributeError, ValueError, TypeError):  # CuPy's alone (asnumpy), or NumPy doesn't tell
        return True
    ours = call.names(getattr(cupy, call.name))
    return all(a == b or (a, b) in OTHER_NAMES for a, b in zip(ours, theirs, strict=False))


def test_methods_that_the_device_path_calls() -> None:
    levels = tuple(f"mpitp/{name}/" for name in ("backend", "comm", "ops", "layers", "models", "optim", "infer"))
    found = [
        call
        for call in calls(lambda path, attribute: attribute.attr in METHODS and ast.unparse(attribute.value) != "np")
        if call.label.startswith(levels)
        and "compiled" not in call.label
        and call.name not in ("get", "copy")
        and not call.label.endswith(".all()")
    ]
    found = [call for call in found if not is_array_module(Path(call.label), call.node.func.value)]
    assert len(found) > 30
    refused = [call for call in found if not call.binds(getattr(cupy.ndarray, call.name), None)]
    assert [call.label for call in refused if ast.unparse(call.node) not in HOST_ARRAYS] == []


def test_what_the_device_path_takes_of_cuda() -> None:
    wanted = set()
    for _, node in nodes(ast.Attribute):
        whole = ast.unparse(node)
        if re.search(r"\b(xp|cupy|module|_module)\.cuda\.[\w.]+$", whole):
            wanted.add(whole.partition(".cuda.")[2])
    assert len(wanted) >= 5, wanted
    for name in wanted:
        assert reduce(getattr, name.split("."), cupy.cuda) is not None
    for name in ("synchronize", "use"):
        assert callable(getattr(cupy.cuda.Device, name))
    assert callable(cupy.cuda.Stream.synchronize) and callable(cupy.cuda.get_current_stream)


def test_contradictions_are_seen() -> None:
    def real(a, axis=None, out=None, *, flag=False): ...

    for planted, told in {
        "a, axis=None, dtype=None": "argument 3 is out, not dtype",
        "a, axis=0": "axis is None by default, not 0",
        "a, b, c, d": "no argument 4 (d)",
        "a, *, where=None": "where= isn't taken",
        "a, *more": "*more isn't taken",
    }.items():
        ours = inspect.signature(eval(f"lambda {planted}: None"))
        assert told in list(contradictions(ours, inspect.signature(real))), planted
    for right in ("a", "a, axis=None", "x, /", "a, *, out=None, flag=False"):
        ours = inspect.signature(eval(f"lambda {right}: None"))
        assert list(contradictions(ours, inspect.signature(real))) == []
