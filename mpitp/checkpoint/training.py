"""Checkpoints of a training run: one layout-free set of files, written by all ranks, published by one rename.

    run/checkpoints/step-00000100/
        config.json, model.safetensors, tokenizer files     a Hugging Face directory that any tool opens
        optimizer/exp_avg.safetensors, exp_avg_sq...        the optimizer's moments under the same tensor names
        state.json                                          step, data position, seeds, configuration
        manifest.json                                       sizes and checksums of all of the above, written last

Names and shapes are global, so any layout can load what any other has written. A directory without a whole manifest, or
with a file that doesn't match it, is not a checkpoint. Which one is the latest is found by looking at all of them.

A save runs in phases of purely local work (write my slices; read back and sum my chunks), between which the ranks
agree. In the foreground they follow one another; in the background a thread does a phase while training goes on, and
the ranks agree at a step's boundary. No thread but the main one ever communicates.
"""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.checkpoint.hf import (
    MODEL,
    NamedModel,
    Shards,
    all_expected,
    index_of,
    load_params,
    plan_shards,
    with_dtype,
    write_owned,
)
from mpitp.checkpoint.safetensors_file import STORED_NAMES, create_file, plan_file
from mpitp.checkpoint.together import on_first_rank, raise_together, together
from mpitp.comm.group import Group
from mpitp.errors import FileError
from mpitp.files import discard, make_staging, os_failure, publish, read_json, write_file, write_json
from mpitp.layers.param import Param
from mpitp.models.names import HfPiece

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer"
CHUNK_BYTES = 1 << 26  # what one checksum covers

Moments = Mapping[str, Mapping[str, Any]]  # kind ("exp_avg"): {parameter: array}


@dataclass(frozen=True, slots=True)
class ArraysAs:
    """Other arrays under a model's parameter names and specs, to be stored and loaded as its parameters are."""

    model: NamedModel
    arrays: Mapping[str, Any]

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """Each array as a parameter."""
        for name, param in self.model.named_params():
            yield name, Param(self.arrays[name], param.spec)

    def hf_pieces(self) -> Mapping[tuple[str, str], HfPiece]:
        """The model's own table."""
        return self.model.hf_pieces()


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into a checkpoint. `documents`: JSON files, `files`: other small files, both the first rank's."""

    model: NamedModel
    moments: Moments
    dtype: str  # of the model and the moments: what is saved is what is in memory
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, Any] | None]
    files: Mapping[str, bytes]

    def sets(self) -> list[tuple[str, str, NamedModel]]:
        """(subdirectory, stem, arrays) of each set of tensors."""
        optimizer = [(OPTIMIZER, kind, ArraysAs(self.model, arrays)) for kind, arrays in self.moments.items()]
        return [("", MODEL, self.model), *optimizer]


class Save:
    """One checkpoint on its way to the disk: phases of local work, agreed between."""

    def __init__(self, root: Path, step: int, contents: Contents, group: Group, keep: int) -> None:
        """Prepare the staging directory. A collective."""
        self.target, self.group, self.keep, self.contents = root / _name(step), group, keep, contents
        shapes = all_expected(contents.model, group)
        stored = STORED_NAMES[contents.dtype]
        self.plans = {(sub, stem): plan_shards(shapes, stored, stem=stem) for sub, stem, _ in contents.sets()}
        self.staging: Path = on_first_rank(group, self._prepare)
        self.phases: list[Callable[[], Any]] = [self._write, self._sum]

    def run(self) -> None:
        """All phases, here and now. A collective."""
        try:
            for phase in self.phases:
                result = together(self.group, phase)
            self.publish(result)
        except BaseException:
            self.discard()
            raise

    def publish(self, own_sums: Mapping[str, Mapping[int, int]]) -> None:
        """Write the manifest and rename the directory into place; drop the oldest checkpoints. A collective."""
        sums = self.group.all_gather_objects(own_sums)
        on_first_rank(self.group, lambda: self._publish(sums))

    def discard(self) -> None:
        """Remove what was written."""
        if self.group.rank == 0:
            discard(self.staging)

    def _prepare(self) -> Path:
        for leftover in self.target.parent.glob(".step-*.partial"):  # of a run that was killed while saving
            discard(leftover)
        staging = make_staging(self.target, overwrite=True, patterns=("*",))  # a damaged one may be in its place
        try:
            (staging / OPTIMIZER).mkdir()
            config = with_dtype(self.contents.config, self.contents.dtype)
            for name, document in {
                "config.json": config,
                STATE: self.contents.state,
                **self.contents.documents,
            }.items():
                if document is not None:
                    write_json(staging / name, document)
            for name, content in self.contents.files.items():
                write_file(staging / name, content)
            for (sub, stem), shards in self.plans.items():
                _create_files(staging / sub, stem, shards)
        except BaseException:
            discard(staging)
            raise
        return staging

    def _write(self) -> None:
        for sub, stem, arrays in self.contents.sets():
            write_owned(arrays, self.staging / sub, self.plans[sub, stem])

    def _sum(self) -> dict[str, dict[int, int]]:
        return checksums(self.staging, self.group.rank, self.group.size)

    def _publish(self, sums: Sequence[Mapping[str, Mapping[int, int]]]) -> None:
        merged: dict[str, dict[int, int]] = {}
        for own in sums:
            for name, chunks in own.items():
                merged.setdefault(name, {}).update(chunks)
        files = {
            name: {"bytes": (self.staging / name).stat().st_size, "crc32": [chunks[i] for i in sorted(chunks)]}
            for name, chunks in sorted(merged.items())
        }
        write_json(self.staging / MANIFEST, {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, "files": files})
        publish(self.staging, self.target)
        for old in checkpoints(self.target.parent)[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)


class BackgroundSave:
    """Runs a save's phases in a thread; `advance` at every step's boundary moves it on. Its contents must be copies."""

    def __init__(self, save: Save) -> None:
        self.save, self._phases = save, list(save.phases)
        self._result: Any = None
        self._error: Exception | None = None
        self._start()

    def advance(self, *, wait: bool = False) -> bool:
        """Whether the checkpoint has been published. A collective; `wait`: don't return before it is."""
        while True:
            if wait:
                self._thread.join()
            is_done = not self._thread.is_alive()
            if not all(self.save.group.all_gather_objects(is_done)):
                return False
            raise_together(self.save.group, self._error)
            if not self._phases:
                self.save.publish(self._result)
                return True
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, args=(self._phases.pop(0),), name="mpitp checkpoint")
        self._thread.start()

    def _work(self, phase: Callable[[], Any]) -> None:
        try:
            self._result = phase()
        except Exception as error:  # raised by the main thread, on all ranks together
            self._error = error


def checkpoints(root: Path) -> list[Path]:
    """The directories that look like checkpoints, newest first; whether they are whole is another question."""
    found = [path for path in root.glob("step-*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def set_aside_newer(path: Path) -> list[Path]:
    """Rename the checkpoints that are newer than `path`, so that a run resumed there doesn't mix with them."""
    everything = checkpoints(path.parent)
    newer = everything[: everything.index(path)] if path in everything else []
    for other in newer:
        target = other.with_name(f"aside-{other.name}")
        shutil.rmtree(target, ignore_errors=True)
        other.rename(target)
    return newer


def newest_whole(root: Path, group: Group, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that matches its manifest; damaged ones are skipped with a notice. A collective."""
    for path in group.broadcast_object(checkpoints(root)):
        damage = find_damage(path, group)
        if damage is None:
            return path
        notice(f"{path} is skipped: {damage}")
    return None


def find_damage(path: Path, group: Group) -> str | None:
    """What is wrong with a checkpoint; None: it is whole. Each rank checks its share of the chunks. A collective."""
    problem = None
    try:
        problem = _damage(path, group.rank, group.size)
    except (FileError, OSError) as error:
        problem = str(error)
    return next((text for text in group.all_gather_objects(problem) if text is not None), None)


def load_arrays(path: Path, model: NamedModel, moments: Moments) -> None:
    """Fill the model's parameters and the moments from a checkpoint; each rank reads the rows it holds."""
    load_params(model, path)
    for kind, arrays in moments.items():
        load_params(ArraysAs(model, arrays), path / OPTIMIZER, stem=kind)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises FileError for a directory that is none, or of a newer format."""
    if not (path / STATE).is_file():
        raise FileError(f"{path} holds no {STATE}, so it is no checkpoint of a training run")
    state = read_json(path / STATE)
    if state.get("format") != FORMAT:
        raise FileError(
            f"{path / STATE}: format {state.get('format')!r} is not the one that this version reads ({FORMAT}); "
            "use the version of mpitp that wrote it"
        )
    return state


def checksums(directory: Path, rank: int, ranks: int) -> dict[str, dict[int, int]]:
    """CRC-32 of this rank's share of the chunks of every file: {file: {chunk: sum}}."""
    sums: dict[str, dict[int, int]] = {}
    turn = 0
    for path in _files(directory):
        for chunk in range(_num_chunks(path.stat().st_size)):
            if turn % ranks == rank:
                sums.setdefault(str(path.relative_to(directory)), {})[chunk] = _crc(path, chunk)
            turn += 1
    return sums


def _damage(path: Path, rank: int, ranks: int) -> str | None:
    if not (path / MANIFEST).is_file():
        return f"it has no {MANIFEST}"
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("chunk_bytes") != CHUNK_BYTES:
        return f"its {MANIFEST} is of another format"
    for name, entry in manifest["files"].items():
        if not (path / name).is_file():
            return f"{name} is missing"
        size = (path / name).stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size} bytes, its {MANIFEST} says {entry['bytes']}"
    for name, chunks in checksums(path, rank, ranks).items():
        for chunk, value in chunks.items():
            if name in manifest["files"] and manifest["files"][name]["crc32"][chunk] != value:
                return f"{name} doesn't match its checksum"
    return None


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)


def _num_chunks(size: int) -> int:
    return max(1, -(-size // CHUNK_BYTES))


def _crc(path: Path, chunk: int) -> int:
    value, left = 0, CHUNK_BYTES
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(chunk * CHUNK_BYTES)
            while left and (data := file.read(min(left, 1 << 20))):
                value = zlib.crc32(data, value)
                left -= len(data)
    except OSError as error:
        raise os_failure("read", path, error) from error
    return value


def _create_files(directory: Path, stem: str, shards: Shards) -> None:
    for name, tensors in shards.items():
        create_file(directory / name, plan_file(tensors))
    if len(shards) > 1:
        write_json(directory / f"{stem}.safetensors.index.json", index_of(shards))


def _name(step: int) -> str:
    return f"step-{step:08}"
