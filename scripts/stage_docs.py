"""Lay out what the site is built from: build/docs/source has README, docs, the course and all files that they link to.

Files keep their places relative to one another, so that the links that work on a forge and in a checkout work in the
site too.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SINGLE = ("README.md", "BENCHMARKS.md", "CHANGELOG.md", "LICENSE")
FOLDERS = {  # which of their files
    "docs": (".md",),
    "examples": (".md", ".py", ".toml", ".ipynb", ".svg", ".png"),
    "mpitp": (".py",),
    "scripts": (".py", ".sbatch", ".sh", ""),
}


def stage(target: Path) -> int:
    """Copy them below `target`, which is made anew; how many."""
    shutil.rmtree(target, ignore_errors=True)
    paths = [ROOT / name for name in SINGLE]
    for folder, endings in FOLDERS.items():
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in endings]
    paths = [path for path in paths if "__pycache__" not in path.parts]
    for path in paths:
        there = target / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there)
    return len(paths)


if __name__ == "__main__":
    build = ROOT / "build" / "docs"
    count = stage(build / "source")
    shutil.copyfile(ROOT / "docs" / "mkdocs.yml", build / "mkdocs.yml")
    print(f"{count} files in {build / 'source'}", file=sys.stderr)
