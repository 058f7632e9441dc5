"""The config of the model that a run file's [model] names, of whatever kind, and the classes that it is to tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mpitp.config import ModelSection
from mpitp.errors import ConfigError
from mpitp.files import read_json
from mpitp.models.encoder_config import EncoderConfig
from mpitp.models.vision_config import VisionConfig

Config = TypeVar("Config")


def named_config(
    section: ModelSection,
    load: Callable[[str], Config],
    parse: Callable[..., Config],
    known: Mapping[str, Any] | None = None,
) -> Config:
    """`load`: of a directory with weights. `parse`: of a parsed config.json, with the keys that the user has written
    here and now as `own`. `known`: fields that follow from the data, where the run file has the model's own fields.

    Raises ConfigError that speaks of the file, or of the run file's section.
    """
    if section.from_ is not None:
        return load(section.from_)
    if section.config is not None:
        return _of_file(Path(section.config), parse)
    try:
        return parse({**(known or {}), **section.fields}, own=section.fields)
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json:", "[model] of the run file:")) from error


def _of_file(path: Path, parse: Callable[..., Config]) -> Config:
    path = path / "config.json" if path.is_dir() else path
    raw = read_json(path)
    try:
        return parse(raw)
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json", str(path), 1)) from error


class Labelled(Protocol):
    """Samples with labels."""

    @property
    def path(self) -> str:
        """Of the file."""

    def classes(self) -> tuple[str, ...]:
        """The labels that occur, in order."""


def classes_of(base: EncoderConfig | VisionConfig, head: str, samples: Labelled) -> tuple[str, ...]:
    """The model's own classes where it is under `head` and has names for them; else the labels of the samples.

    Raises ConfigError where there are fewer than two.
    """
    if base.head == head and not all(name.startswith("LABEL_") for name in base.labels):
        return base.labels
    classes = samples.classes()
    if len(classes) < 2:
        raise ConfigError(f"{samples.path} has the one label {classes[0]!r:.60}: there is nothing to choose from")
    return classes
