"""What every rank of a run must have alike: the run file as it was understood, and what the files it names hold."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitp.checkpoint.load import AGREED_FILES, model_facts
from mpitp.comm.agreement import Facts, file_fact, folder_facts
from mpitp.config import RunConfig
from mpitp.data.token_file import MANIFEST

BY_CONTENT = ("model.from", "model.config", "data.train", "data.valid")  # may lie elsewhere on each node


def run_facts(config: RunConfig) -> Facts:
    """Each key of the run file with its value; of models and texts, what is in them."""
    keys = flat(plain(dataclasses.asdict(config)))
    facts = {key.replace("model.fields.", "model."): value for key, value in keys.items() if key not in BY_CONTENT}
    facts["train.run_dir"] = os.path.abspath(config.train.run_dir)  # ranks may stand in different folders
    texts = {"data.train": config.data.train, "data.valid": config.data.valid}
    contents = {
        f"{MANIFEST} of {key}": "none" if folder is None else file_fact(_told_by(Path(folder)))
        for key, folder in texts.items()
    }
    if config.mesh.group:
        contents |= {"mesh.group's file": file_fact(Path(config.mesh.group.rpartition(":")[0]))}
    return facts | contents | model_facts("model.from", config.model.from_) | _config_fact(config.model.config)


def _told_by(data: Path) -> Path:
    """The file that tells what data are: a labelled text is one itself."""
    return data / MANIFEST if data.is_dir() else data


def _config_fact(path: str | None) -> Facts:
    """Of a config.json to train from scratch, or of the directory with it."""
    if path is None or Path(path).is_dir():
        return folder_facts("model.config", None if path is None else Path(path), AGREED_FILES[:1])
    return {"model.config": file_fact(Path(path))}


def plain(value: Any) -> Any:
    """As JSON will give it back: tuples as lists, dataclasses as dictionaries."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dictionaries as {"a.b.c": value}; the field `from_` as its key `from`."""
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{name}.{key.rstrip('_')}" if name else key.rstrip("_"))
    return found
