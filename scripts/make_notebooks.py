#!/usr/bin/env python3
"""Make the notebooks of all examples from their scripts and exercises, and run them.

    python scripts/make_notebooks.py [NAME ...]      make examples/notebooks/*.ipynb, their outputs included
    python scripts/make_notebooks.py --run FILE      run one that is there, and print what it prints

A script is the one source: its docstring becomes the text, its imports, constants and functions a cell each with its
docstring before it, then comes what it does when started, and its exercises (`examples/check.py`) as blanks with
checks. Every cell must run. Needs nbclient and ipykernel (pip install "mpitp[test]"); `scripts/notebooks` opens them.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FOLDER = EXAMPLES / "notebooks"
SCRIPTS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py")) + sorted(EXAMPLES.glob("your_own_*.py"))
SETUP = """import sys

sys.path.insert(0, "..")  # course.py and check.py, beside the scripts
sys.argv[1:] = []  # the notebook's own

from check import blank"""
PICTURES = {  # what is shown above the code
    "01": ("cut.svg", "How the weights of a block are cut"),
    "02": ("moving.svg", "An MLP on three ranks, forward and backward"),
    "03": ("forward_backward.svg", "Forward and backward pass of a block"),
    "04": ("heads.svg", "Query heads and KV heads on four ranks"),
    "05": ("vocabulary.svg", "A vocabulary over four ranks"),
    "06": ("forward_backward.svg", "Forward and backward pass of a block"),
    "08": ("layouts.png", "Losses of one model on 1, 2, 3 and 4 ranks"),
}


def cells_of(script: Path) -> list[tuple[str, str]]:
    """(markdown or code, source) of every cell."""
    text = script.read_text(encoding="utf-8")
    tree = ast.parse(text)
    title, _, explanation = (ast.get_docstring(tree) or "").partition("\n")
    note = f"Made from [`{script.name}`](../{script.name}) by `scripts/make_notebooks.py`: change the script, not this."
    lines = [line if line.startswith("    ") else escaped(line) for line in explanation.splitlines()]
    name = script.name[:2] if script.name[0].isdecimal() else script.stem
    picture, words = PICTURES.get(name, ("", ""))
    shown = ["", f"![{words}](../pictures/{picture})"] if picture else []
    heading = "\n".join([f"# {' '.join(title.split())}", *lines, *shown, "", note])
    cells = [("markdown", heading), ("code", SETUP)]
    for source in code_of(text, tree):
        cells += [("markdown", told) for told in told_of(source)] + [("code", source)]
    return cells + blanks_of(name)


def told_of(source: str) -> list[str]:
    """What a function or a class is for, before its cell: the first line of its docstring."""
    node = ast.parse(source).body[0]
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return []
    doc = (ast.get_docstring(node) or ("What is done, and proved:" if node.name == "main" else "")).split("\n")[0]
    return [f"**`{node.name}`**  {escaped(doc)}"] if doc else []


def blanks_of(name: str) -> list[tuple[str, str]]:
    """The exercises: a question, and a blank that is checked."""
    sys.path[:0] = [str(EXAMPLES)]
    try:
        exercises = import_module("check").table()[name]
    finally:
        sys.path.remove(str(EXAMPLES))
    cells = [("markdown", "## Exercises")]
    for number, exercise in enumerate(exercises, 1):
        cells += [("markdown", f"{number}. {escaped(exercise.question)}")]
        cells += [("code", f'blank("{name}", {number}, "___")  # your answer in the place of ___')]
    return cells


def escaped(line: str) -> str:
    """A line of text whose < and * mean themselves in Markdown."""
    return line.replace("<", "&lt;").replace("*", "\\*")


def code_of(text: str, tree: ast.Module) -> Iterator[str]:
    """The code of every cell: neighbouring imports together, neighbouring constants together, functions one by one."""
    lines, held, held_kind = text.splitlines(), list[str](), ""
    for node, after in zip(tree.body[1:], [*tree.body[2:], None], strict=True):
        first, kind = first_line(node), type(node).__name__.removesuffix("From")
        source = lines[first - 1 : first_line(after) - 1 if after else node.end_lineno]
        if isinstance(node, ast.If):  # if __name__ == "__main__": a notebook simply does it
            source = [line[4:] for line in source[1:]]
        if held and (kind != held_kind or kind in ("FunctionDef", "ClassDef")):
            yield "\n".join(held).strip()
            held = []
        held, held_kind = held + source, kind
    yield "\n".join(held).strip()


def first_line(node: ast.stmt) -> int:
    """Where a statement begins, its decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def notebook_of(script: Path) -> dict[str, Any]:
    """The notebook without outputs, in Jupyter's format 4.5."""
    cells = []
    for index, (kind, source) in enumerate(cells_of(script)):
        cell = {"cell_type": kind, "id": f"cell-{index}", "metadata": {}, "source": source.splitlines(keepends=True)}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with its outputs. Raises nbclient's CellExecutionError for a cell that fails."""
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.reads(json.dumps(notebook), as_version=4)
    where, quiet = {"metadata": {"path": str(FOLDER)}}, ["--log-level=ERROR"]
    NotebookClient(node, timeout=120, resources=where, record_timing=False, extra_arguments=quiet).execute()
    done = json.loads(nbformat.writes(node))
    done["metadata"] = notebook["metadata"]  # not the versions of this machine
    return done


def printed(notebook: dict[str, Any]) -> str:
    """All that the cells have written to stdout and stderr."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", "")) for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FILE", help="a notebook to run; nothing is written")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose name begins so: 07")
    args = parser.parse_args()
    if args.run:
        print(printed(run(json.loads(args.run.read_text(encoding="utf-8")))))
        return
    FOLDER.mkdir(exist_ok=True)
    for script in (s for s in SCRIPTS if not args.names or s.name.startswith(tuple(args.names))):
        path = FOLDER / f"{script.stem}.ipynb"
        path.write_text(json.dumps(run(notebook_of(script)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
