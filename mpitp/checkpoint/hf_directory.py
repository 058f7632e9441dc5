"""Hugging Face model directories, opened strictly.

A directory holds `config.json` and the weights: `model.safetensors`, or several files and the index
`model.safetensors.index.json` that maps each tensor to its file.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mpitp.checkpoint.safetensors_file import SafetensorsFile, Span
from mpitp.errors import FileError
from mpitp.files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL = "model"  # the word that the weights' files begin with
FIRST_FEW = 5

Shape = tuple[int, ...]


def read_config(directory: str | Path) -> dict[str, Any]:
    """The directory's config.json."""
    path = _existing_directory(directory) / "config.json"
    if not path.exists():
        raise FileError(f"{directory} holds no config.json, so it is no Hugging Face model directory")
    return read_json(path)


def read_generation_config(directory: str | Path) -> dict[str, Any]:
    """The directory's generation_config.json; empty where there is none."""
    path = Path(directory) / "generation_config.json"
    return read_json(path) if path.exists() else {}


class HfWeights:
    """The tensors of a Hugging Face directory, by name, whichever file they are in. Opening reads headers only."""

    def __init__(self, directory: str | Path, stem: str = MODEL) -> None:
        self.directory = _existing_directory(directory)
        self.index = f"{stem}.safetensors.index.json"
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        self._stored_name: dict[str, str] = {}
        try:
            has_index = (self.directory / self.index).exists()
            if (self.directory / f"{stem}.safetensors").exists():
                if has_index:
                    self._refuse_others(f"{stem}.safetensors")
                self._add_file(f"{stem}.safetensors")
            elif has_index:
                self._add_indexed()
            else:
                raise FileError(_no_weights_message(self.directory, stem))
        except FileError:
            self.close()
            raise

    def shapes(self) -> dict[str, Shape]:
        """Name and stored shape of every tensor."""
        return {name: file.tensors[self._stored_name[name]].shape for name, file in self._file_of.items()}

    def read(self, name: str, out: np.ndarray, starts: Sequence[int] = ()) -> None:
        """Fill `out` with a box of a tensor: see `SafetensorsFile.read`."""
        self._file_of[name].read(self._stored_name[name], out, starts)

    def span(self, name: str, like: np.ndarray, starts: Sequence[int] = ()) -> Span | None:
        """Where a box of a tensor lies as it is wanted: see `SafetensorsFile.span`."""
        return self._file_of[name].span(self._stored_name[name], like, starts)

    def align_names(self, expected: Mapping[str, Shape]) -> None:
        """Let tensors saved from the bare model be found: "wte.weight" as "transformer.wte.weight".

        Such files leave out the first word of all names but that of the head. A word is supplied only where no stored
        name has it and the longer name is an expected one. A word in front of all names that none expects (a wrapper's,
        "module.") is left out.
        """
        self._leave_out_wrapper(expected)
        stored_words = {name.partition(".")[0] for name in self._file_of}
        for word in sorted({name.partition(".")[0] for name in expected} - stored_words):
            for name in [name for name in self._file_of if f"{word}.{name}" in expected and name not in expected]:
                self._file_of[f"{word}.{name}"] = self._file_of.pop(name)
                self._stored_name[f"{word}.{name}"] = self._stored_name.pop(name)

    def _leave_out_wrapper(self, expected: Mapping[str, Shape]) -> None:
        first = {name.partition(".")[0] for name in self._file_of}
        wrapper = first.pop() + "." if len(first) == 1 else ""
        inner = {name.removeprefix(wrapper): name for name in self._file_of}
        if wrapper and not any(name.startswith(wrapper) for name in expected) and inner.keys() & expected.keys():
            self._file_of = {short: self._file_of[name] for short, name in inner.items()}
            self._stored_name = {short: self._stored_name[name] for short, name in inner.items()}

    def take_for(self, copies: Mapping[str, str]) -> None:
        """Let a tensor that is stored only under its copy's name be found: {copy: of}.

        Of a tied pair some writers keep one alone: `safetensors.torch.save_model` the first in the alphabet.
        """
        for copy, of in copies.items():
            if of not in self._file_of and copy in self._file_of:
                self._file_of[of] = self._file_of.pop(copy)
                self._stored_name[of] = self._stored_name.pop(copy)

    def check_tensors(self, expected: Mapping[str, Shape], ignorable: Sequence[str] = ()) -> None:
        """Refuse a directory whose tensors aren't the expected ones, all differences in one FileError.

        ignorable: patterns (as of file names) of tensors that may be there and aren't needed, such as "*.attn.bias".
        """
        found = self.shapes()
        extra = sorted(set(found) - set(expected))
        differences = {
            "missing": sorted(set(expected) - set(found)),
            "unexpected": [name for name in extra if not any(fnmatch.fnmatchcase(name, p) for p in ignorable)],
            "mis-shaped": [
                f"{name} (expected {list(shape)}, got {list(found[name])})"
                for name, shape in sorted(expected.items())
                if name in found and found[name] != tuple(shape)
            ],
        }
        lines = [f"{len(names)} {what}: {first_few(names)}" for what, names in differences.items() if names]
        if lines:
            raise FileError(f"the tensors in {self.directory} don't fit its config.json: " + "; ".join(lines))

    def close(self) -> None:
        """Give all files back."""
        for file in self._files:
            file.close()

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _add_file(self, file_name: str) -> None:
        file = SafetensorsFile(self.directory / file_name)
        self._files.append(file)
        for name in file.tensors:
            if name in self._file_of:
                raise FileError(
                    f"{self.directory}: tensor {name} is in {self._file_of[name].path.name} and in {file_name}"
                )
            self._file_of[name], self._stored_name[name] = file, name

    def _refuse_others(self, file: str) -> None:
        """An index beside one file of all weights must be that file's."""
        others = sorted({*self._weight_map().values()} - {file})
        if others:
            raise FileError(
                f"{self.directory} holds two models: {file}, and {self.index} of {first_few(others)}; remove the one "
                "that isn't meant"
            )

    def _weight_map(self) -> dict[str, str]:
        path = self.directory / self.index
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise FileError(f"{path} must map tensor names to file names under weight_map")
        return weight_map

    def _add_indexed(self) -> None:
        path, weight_map = self.directory / self.index, self._weight_map()
        files = sorted(set(weight_map.values()))
        if outside := [file for file in files if Path(file).name != file]:
            raise FileError(f"{path} names a file outside its directory: {outside[0]}")
        missing = [file for file in files if not (self.directory / file).is_file()]
        if missing:
            raise FileError(
                f"{self.directory} is an incomplete download: {len(missing)} of the {len(files)} files that "
                f"{self.index} names are missing: {first_few(missing)}"
            )
        for file in files:
            self._add_file(file)
        absent = [
            name
            for name, file in weight_map.items()
            if name not in self._file_of or self._file_of[name].path.name != file
        ]
        if absent:
            raise FileError(
                f"{self.directory} is an incomplete download: {len(absent)} tensors aren't in the files that "
                f"{self.index} names for them: {first_few(absent)}"
            )


def _existing_directory(directory: str | Path) -> Path:
    path = Path(directory)
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "doesn't exist"
        cure = "; mpitp convert makes one of it" if path.suffix == ".gguf" else ""
        raise FileError(f"model directory {directory} {what}{cure}")
    return path


def _class_of(directory: Path) -> str:
    """What transformers calls the model, as far as config.json says so: another class would leave its head out."""
    names = read_config(directory).get("architectures") if (directory / "config.json").exists() else None
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) and first.isidentifier() else "AutoModelForCausalLM"


def _no_weights_message(directory: Path, stem: str) -> str:
    if stem != MODEL:
        return f"{directory} holds neither {stem}.safetensors nor an index of several such files"
    pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{directory} holds {pickled[0]} but no {WEIGHTS}: pickled weights can run code and aren't read; save the "
            "model as safetensors and use that directory. Where PyTorch and transformers are installed: python -c "
            f'"from transformers import {_class_of(directory)} as M; '
            f"M.from_pretrained('{directory}').save_pretrained('DIR')\""
        )
    return f"{directory} holds neither {WEIGHTS} nor {INDEX}"


def first_few(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    more = ", ..." if len(names) > FIRST_FEW else ""
    return ", ".join(names[:FIRST_FEW]) + more
