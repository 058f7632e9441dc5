"""House rules that no linter checks: docstrings, function length, imports without effects, quick help."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mpitp"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 50
MAX_FILE_LINES = 450
MAX_HELP_SECONDS = 1.0  # about 0.1 on a quiet machine

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_docstring(tree: ast.Module) -> Iterator[str]:
    """Public functions and classes, and methods of classes that inherit from nothing, that have no docstring."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield node.name
            if isinstance(node, ast.ClassDef) and not node.bases:
                methods = [m for m in node.body if isinstance(m, Function) and not m.name.startswith("_")]
                yield from (f"{node.name}.{m.name}" for m in methods if not ast.get_docstring(m))


def long_functions(tree: ast.Module) -> Iterator[str]:
    """Functions with more than the allowed number of lines, docstring not counted."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            first = node.body[0] if ast.get_docstring(node) else None
            docstring = first.end_lineno - first.lineno + 1 if first else 0
            lines = node.end_lineno - node.lineno + 1 - docstring
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} ({lines} lines)"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_public_things_have_docstrings(path: Path) -> None:
    assert list(without_docstring(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_are_short(path: Path) -> None:
    assert list(long_functions(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


def test_these_checks_see_planted_faults() -> None:
    tree = ast.parse('def f():\n    """Long."""\n' + "    x = 1\n" * 60 + "class C:\n    def m(self): pass\n")
    assert list(long_functions(tree)) == ["f (61 lines)"]
    assert list(without_docstring(tree)) == ["C", "C.m"]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_left_open(path: Path) -> None:
    assert not re.findall(r"\b(TODO|FIXME|XXX)\b", path.read_text(encoding="utf-8"))


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in FILES}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, with this checkout's package first on its path."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=60)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


IMPORT_EVERYTHING = """
import importlib, os, signal, sys, threading, warnings

def state():
    handlers = {s: signal.getsignal(s) for s in signal.Signals}
    return (dict(os.environ), sys.excepthook, threading.excepthook, handlers, threading.active_count(), os.getcwd())

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
assert state() == before, "an import changed a global setting"
loaded = {"mpi4py.MPI", "cupy", "torch"} & set(sys.modules)
assert not loaded, f"an import brought in {loaded}"
if "numpy" in sys.modules:
    import numpy as np
    usual = dict(divide="warn", over="warn", under="ignore", invalid="warn")
    assert np.geterr() == usual, "NumPy's error state changed"
"""


def test_importing_every_module_starts_and_sets_nothing() -> None:
    # The peers of the benchmark are programs for another Python, one that has their libraries.
    modules = [path for path in FILES if path.name != "__main__.py" and path.parent.name != "peers"]
    names = [module_name(path) for path in modules]
    result = run_python(IMPORT_EVERYTHING, *names)
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""


IMPORT_WITHOUT = """
import importlib, sys
for name in sys.argv[1].split():
    sys.modules[name] = None
for name in sys.argv[2:]:
    importlib.import_module(name)
"""
ONLY_IN_TESTS = "safetensors openai nbclient ipykernel pytest hypothesis matplotlib PIL transformers"
NEED_NO_EXTRA = ("step", "train", "infer", "verify", "trace", "plan", "checkpoint", "convert", "data", "doctor")


def test_a_base_install_can_import_every_verb() -> None:
    # The tests' environment has more libraries than a reader's: what only it has must not be needed.
    parts = [PACKAGE / part for part in NEED_NO_EXTRA]
    names = [module_name(path) for path in FILES if any(part in path.parents for part in parts)]
    result = run_python(IMPORT_WITHOUT, ONLY_IN_TESTS + " numba llvmlite fastapi uvicorn pydantic starlette", *names)
    assert result.returncode == 0, result.stderr


def test_importing_package_and_command_line_brings_in_no_numpy() -> None:
    code = 'import sys, mpitp, mpitp.cli; print(*sorted({"numpy", "mpi4py", "cupy", "tokenizers"} & set(sys.modules)))'
    result = run_python(code)
    assert (result.stdout.strip(), result.stderr) == ("", "")


# Help is asked for on login nodes, where neither an MPI library nor fast disks need be at hand.
HELP = """
import sys
sys.modules["mpi4py"] = sys.modules["numpy"] = sys.modules["cupy"] = None
from mpitp.cli import main
sys.exit(main(sys.argv[1:]))
"""


def help_of(*verb: str) -> tuple[str, float]:
    """Help text of a verb, and the least of three times it took, in seconds."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = run_python(HELP, *verb, "--help")
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
    return result.stdout, min(seconds)


def verbs() -> list[str]:
    from mpitp.cli import VERBS

    return list(VERBS)


def test_help_names_every_verb_and_is_quick() -> None:
    text, seconds = help_of()
    assert [verb for verb in verbs() if verb not in text] == []
    assert seconds < MAX_HELP_SECONDS


@pytest.mark.parametrize("verb", verbs())
def test_help_of_verb_teaches_and_is_quick(verb: str) -> None:
    text, seconds = help_of(verb)
    assert f"mpitp {verb}" in text
    assert len(text.splitlines()) > 5
    assert seconds < MAX_HELP_SECONDS


def test_version() -> None:
    result = run_python(HELP, "--version")
    assert result.returncode == 0
    assert re.fullmatch(r"mpitp \d+\.\d+\.\d+\S*\n", result.stdout)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_standard_error_is_written_through_one_file(path: Path) -> None:
    """`print(..., file=sys.stderr)` lands on standard output where standard error is closed."""
    if path.name != "error_stream.py" and path.parent.name != "peers":  # programs for another Python
        assert "sys.stderr" not in path.read_text(encoding="utf-8")
