"""A PATH without srun, also on a machine that has one."""

from __future__ import annotations

import os
from pathlib import Path


def path_without_srun(folder: Path, path: str) -> str:
    """All that is on `path` but srun; links in `folder` stand for what else is where one lies."""
    found = []
    for number, name in enumerate(path.split(os.pathsep)):
        if (Path(name) / "srun").exists():
            links = folder / f"path-{number}"
            links.mkdir()
            for entry in Path(name).iterdir():
                if entry.name != "srun":
                    (links / entry.name).symlink_to(entry)
            name = str(links)
        found.append(name)
    return os.pathsep.join(found)
