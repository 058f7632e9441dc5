"""Imports point downwards only: every file's syntax tree is read, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "mpitp"

LEVELS = {
    "errors": 0,
    "config": 0,
    "files": 0,
    "error_stream": 0,
    "text": 0,
    "paths": 0,
    "progress_bar": 1,
    "run_file": 1,
    "backend": 1,
    "comm": 2,
    "ops": 2,
    "layers": 3,
    "models": 4,
    **dict.fromkeys(["optim", "data", "checkpoint", "pipeline", "trace"], 5),
    **dict.fromkeys(["train", "infer", "step", "doctor", "convert"], 6),
    **dict.fromkeys(["plan", "serve", "evaluate"], 7),  # these run other programs' steps
    "verify": 8,  # checks the layouts that are planned too
    "bench": 8,  # measures the server too
    "launch": 9,
    "cli": 10,
    "__main__": 11,
}


def unit_of(path: Path) -> str:
    """The module or package directly below mpitp that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports; `from a import b` gives both a and a.b."""
    package = ("mpitp", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def is_package_part(name: str) -> bool:
    """Whether the name under mpitp is a module or a package, not an attribute such as __version__."""
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() or name in LEVELS


def violations(source: str, path: Path) -> list[str]:
    """One line for each import of `source` that doesn't point down."""
    unit = unit_of(path)
    if unit != "__init__" and unit not in LEVELS:
        return [f"{path}: '{unit}' has no level: give it one in this table"]
    own = LEVELS.get(unit, -1)  # mpitp/__init__.py imports nothing of the package
    found = {}
    for line, name in imported_modules(source, path):
        parts = name.split(".")
        if parts[0] != "mpitp" or len(parts) < 2 or not is_package_part(parts[1]):
            continue
        other = parts[1]
        down = LEVELS.get(other, 99) < own
        facts = other in ("errors", "text") and own == 0
        if other != unit and not down and not facts:
            level = LEVELS.get(other, "none")
            found[line, other] = f"{path}:{line}: {unit} (level {own}) imports {other} (level {level})"
    return list(found.values())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    assert not violations(path.read_text(encoding="utf-8"), path)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/gelu.py", "from mpitp.comm.group import Group"),
        ("comm/mpi.py", "import mpitp.ops.gelu"),
        ("layers/linear.py", "def late():\n    from mpitp.models import load_model"),
        ("optim/adamw.py", "from mpitp import checkpoint"),
        ("data/files.py", "from ..optim import adamw"),
        ("train/loop.py", "from ..infer.generate import generate"),
        ("backend/arrays.py", "import importlib\nimportlib.import_module('mpitp.layers.param')"),
        ("layers/deep/er.py", "from ...cli import main"),
        ("__init__.py", "from . import models"),
        ("errors.py", "if False:\n    from mpitp.config import X"),
        ("models/gpt2.py", "if TYPE_CHECKING:\n    from mpitp.checkpoint.hf import read"),
        ("newcomer/x.py", ""),
    ],
)
def test_guard_sees_planted_import(file: str, source: str) -> None:
    assert len(violations(source, PACKAGE / file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config.py", "from mpitp.errors import ConfigError"),
        ("layers/linear.py", "from mpitp.layers.param import Param\nfrom .param import Param\nfrom . import param"),
        ("layers/linear.py", "from mpitp.comm.group import Group\nfrom mpitp.ops import gelu\nimport numpy"),
        ("cli.py", "from mpitp import __version__\nfrom mpitp.train.command import run"),
        ("train/loop.py", "from ..optim import adamw"),
    ],
)
def test_guard_lets_downward_import_pass(file: str, source: str) -> None:
    assert violations(source, PACKAGE / file) == []
