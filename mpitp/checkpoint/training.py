"""Checkpoints of a training run: one layout-free set of files, written by all ranks, published by one rename.

    run/checkpoints/step-00000100/
        config.json, model.safetensors, tokenizer files     a Hugging Face directory that any tool opens
        optimizer/exp_avg.safetensors, exp_avg_sq...        the optimizer's moments under the same tensor names
        state.json                                          step, data position, seeds, configuration
        manifest.json                                       sizes and checksums of all of the above, written last

Names and shapes are global, so any layout can load what any other has written. A directory without a whole manifest, or
with a file that doesn't match it, is not a checkpoint. Which one is the latest is found by looking at all of them.

A save runs in phases of purely local work, between which the ranks agree and tell one another what came of it:

    the first rank makes the directory; each writes its slices, sums them on the way (`chunk_sums.py`) and brings them
    to the disk; the first rank joins the sums in the manifest, renames, and drops the oldest checkpoints

In the foreground they follow one another; in the background a thread does a phase while training goes on, and the ranks
agree at a step's boundary. No thread but the main one ever communicates.
"""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.checkpoint.chunk_sums import ChunkSums, Sums, join
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
from mpitp.checkpoint.safetensors_file import (
    STORED_NAMES,
    SafetensorsWriter,
    create_file,
    plan_file,
    read_header_bytes,
)
from mpitp.checkpoint.together import gather_together, on_first_rank, raise_together
from mpitp.comm.group import Group
from mpitp.errors import FileError
from mpitp.files import (
    discard,
    make_staging,
    os_failure,
    publish,
    read_json,
    sync_directory,
    sync_file,
    write_file,
    write_json,
)
from mpitp.layers.param import Param
from mpitp.models.names import HfPiece

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer"
ASIDE = "aside-"  # before the name of a checkpoint that the run didn't go on from
CHUNK_BYTES = 1 << 26  # what one checksum covers
READ_BYTES = 1 << 20

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
    """What goes into a checkpoint. `documents`: JSON files, `files`: other small files, both the first rank's.

    `companions`: files elsewhere that must be on the disk before the checkpoint counts (the loss log up to its step).
    """

    model: NamedModel
    moments: Moments
    dtype: str  # of the model and the moments: what is saved is what is in memory
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, Any] | None]
    files: Mapping[str, bytes]
    companions: Sequence[Path] = ()

    def sets(self) -> list[tuple[str, str, NamedModel]]:
        """(subdirectory, stem, arrays) of each set of tensors."""
        optimizer = [(OPTIMIZER, kind, ArraysAs(self.model, arrays)) for kind, arrays in self.moments.items()]
        return [("", MODEL, self.model), *optimizer]


class Frozen:
    """A copy of a model's parameters in host memory, with the model's names and specs."""

    def __init__(self, model: NamedModel) -> None:
        self._params = [(name, Param(_copied(param.data), param.spec)) for name, param in model.named_params()]
        self._pieces = model.hf_pieces()

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """The copies."""
        return iter(self._params)

    def hf_pieces(self) -> Mapping[tuple[str, str], HfPiece]:
        """The model's own table."""
        return self._pieces


def frozen(contents: Contents) -> Contents:
    """The contents as they are now, in host memory: what may be saved while training goes on."""
    moments = {kind: {name: _copied(a) for name, a in arrays.items()} for kind, arrays in contents.moments.items()}
    return replace(contents, model=Frozen(contents.model), moments=moments)


class Save:
    """One checkpoint on its way to the disk: phases of local work, agreed between."""

    def __init__(self, root: Path, step: int, contents: Contents, group: Group, keep: int) -> None:
        """Plan the files. A collective; nothing is written yet."""
        self.target, self.group, self.keep, self.contents = root / _name(step), group, keep, contents
        shapes = all_expected(contents.model, group)
        stored = STORED_NAMES[contents.dtype]
        self.plans = {(sub, stem): plan_shards(shapes, stored, stem=stem) for sub, stem, _ in contents.sets()}
        self.phases: list[Callable[[list[Any]], Any]] = [self._prepare, self._write, self._publish]
        self._staging: Path | None = None
        self._sizes: dict[str, int] = {}
        self._removal: threading.Thread | None = None

    def run(self) -> None:
        """All phases, here and now. A collective."""
        results: list[Any] = []
        try:
            for phase in self.phases:
                results = gather_together(self.group, partial(phase, results))
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        if self.group.rank == 0 and self._staging is not None:
            discard(self._staging)

    def _prepare(self, results: list[Any]) -> tuple[Path, dict[str, int]] | None:
        """The first rank's part before the tensors; for all: the directory, and the size of each file in it."""
        if self.group.rank:
            return None
        for pattern in (".step-*.partial", ".step-*.old"):  # of a run that was killed while saving
            for leftover in self.target.parent.glob(pattern):
                discard(leftover)
        staging = make_staging(self.target, overwrite=True, patterns=("*",))  # a damaged one may be in its place
        try:
            self._fill(staging)
        except BaseException:
            discard(staging)
            raise
        self._staging = staging
        return staging, _sizes(staging)

    def _fill(self, staging: Path) -> None:
        (staging / OPTIMIZER).mkdir()
        config = with_dtype(self.contents.config, self.contents.dtype)
        documents = {"config.json": config, STATE: self.contents.state, **self.contents.documents}
        for name, document in documents.items():
            if document is not None:
                write_json(staging / name, document)
        for name, content in self.contents.files.items():
            write_file(staging / name, content)
        for (sub, stem), shards in self.plans.items():
            _create_files(staging / sub, stem, shards)
        for path in self.contents.companions:
            sync_file(path)

    def _write(self, results: list[Any]) -> dict[str, Sums]:
        """Write this rank's slices; its share of every file's sums. Files go to the disk while the next is written."""
        self._staging, self._sizes = results[0]
        with ThreadPoolExecutor(
            2, "mpitp checkpoint"
        ) as pool:  # of each kind one: sums, files on their way to the disk
            sums = {name: ChunkSums(size, CHUNK_BYTES, pool) for name, size in self._sizes.items()}
            closing: list[Future[None]] = []

            def close(writer: SafetensorsWriter) -> None:
                closing.append(pool.submit(writer.close))

            sets = self.contents.sets()
            first = self.group.rank % len(sets)  # ranks that write to one file at a time wait for one another
            for sub, stem, arrays in sets[first:] + sets[:first]:
                gathering = {name: sums[f"{sub}/{name}" if sub else name] for name in self.plans[sub, stem]}
                write_owned(arrays, self._staging / sub, self.plans[sub, stem], gathering, close)
            for done in closing:
                done.result()
            return {name: own for name, gathered in sums.items() if (own := gathered.sums())}

    def _publish(self, results: list[Any]) -> None:
        if self.group.rank:
            return
        assert self._staging is not None
        shares = {name: [own[name] for own in results if name in own] for name in self._sizes}
        write_json(self._staging / MANIFEST, manifest(self._staging, self._sizes, shares))
        sync_directory(self._staging / OPTIMIZER)
        publish(self._staging, self.target)
        self._removal = threading.Thread(target=self._remove_oldest, name="mpitp checkpoint removal")
        self._removal.start()

    def _remove_oldest(self) -> None:
        """Leave `keep` checkpoints; those set aside go when so many are of their step or later."""
        root = self.target.parent
        found = checkpoints(root)
        old = found[self.keep :]
        if len(found) >= self.keep:
            last = _step_of(found[self.keep - 1])
            old += [path for path in root.glob(f"{ASIDE}step-*") if 0 <= _step_of(path, ASIDE) <= last]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)

    def wait_for_removal(self) -> None:
        """Return when the oldest checkpoints are gone; a published save removes them while its caller goes on."""
        if self._removal is not None:
            self._removal.join()


class BackgroundSave:
    """Runs a save's phases in a thread; `advance` at every step's boundary moves it on. Its contents must be copies.

    `seconds`: from the beginning until the checkpoint was published.
    """

    def __init__(self, save: Save) -> None:
        self.save, self._phases = save, list(save.phases)
        self.seconds, self._started = 0.0, time.perf_counter()
        self._result: Any = None
        self._error: Exception | None = None
        self._start([])

    def advance(self, *, wait: bool = False) -> bool:
        """Whether the checkpoint has been published. A collective; `wait`: don't return before it is."""
        while True:
            if wait:
                self._thread.join()
            is_done = np.array([not self._thread.is_alive()], np.int32)
            if not self.save.group.all_reduce(is_done, op="min")[0]:
                return False
            try:
                raise_together(self.save.group, self._error)
            except BaseException:
                self.save.discard()
                raise
            if not self._phases:
                self.seconds = time.perf_counter() - self._started
                return True
            self._start(self.save.group.all_gather_objects(self._result))

    def _start(self, results: list[Any]) -> None:
        phase = partial(self._phases.pop(0), results)
        self._thread = threading.Thread(target=self._work, args=(phase,), name="mpitp checkpoint")
        self._thread.start()

    def _work(self, phase: Callable[[], Any]) -> None:
        try:
            self._result = phase()
        except Exception as error:  # raised by the main thread, on all ranks together
            self._error = error


def checkpoints(root: Path) -> list[Path]:
    """The directories that look like checkpoints, newest first; whether they are whole is another question."""
    found = [path for path in root.glob("step-*") if path.is_dir() and _step_of(path) >= 0]
    return sorted(found, key=_step_of, reverse=True)


def set_aside(paths: Sequence[Path]) -> None:
    """Rename checkpoints, so that a run that goes on from an earlier step doesn't mix with them."""
    for path in paths:
        target = path.with_name(f"{ASIDE}{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        try:
            path.rename(target)
        except OSError as error:
            raise os_failure("rename", path, error) from error


def newest_whole(root: Path, group: Group, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that matches its manifest; damaged ones are skipped with a notice. A collective.

    Raises FileError when the newest is of a format that this version doesn't know: it isn't damaged.
    """
    for path in group.broadcast_object(checkpoints(root)):
        on_first_rank(group, partial(_refuse_newer_format, path))
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
    _check_format(path / STATE, state.get("format"))
    if type(state.get("step")) is not int or state["step"] < 1:
        raise FileError(f"{path / STATE}: step is {state.get('step')!r}, expected a whole number of at least 1")
    return state


def manifest(staging: Path, sizes: Mapping[str, int], shares: Mapping[str, Sequence[Sums]]) -> dict[str, Any]:
    """The manifest's content; files that no rank has summed while writing (the small ones) are read."""
    files = {}
    for name, size in sorted(sizes.items()):
        if shares[name]:
            header = ChunkSums(size, CHUNK_BYTES)
            header.add(0, memoryview(read_header_bytes(staging / name)))
            sums = join([header.sums(), *shares[name]], size, CHUNK_BYTES)
        else:
            sums = [_crc(staging / name, chunk) for chunk in range(_num_chunks(size))]
        files[name] = {"bytes": size, "crc32": sums}
    return {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, "files": files}


def checksums(directory: Path, sizes: Mapping[str, int], rank: int, ranks: int) -> dict[str, dict[int, int]]:
    """CRC-32 of this rank's share of the chunks of these files: {file: {chunk: sum}}."""
    everything = [(name, chunk) for name, size in sorted(sizes.items()) for chunk in range(_num_chunks(size))]
    sums: dict[str, dict[int, int]] = {}
    for name, chunk in everything[rank::ranks]:
        sums.setdefault(name, {})[chunk] = _crc(directory / name, chunk)
    return sums


def _damage(path: Path, rank: int, ranks: int) -> str | None:
    if not (path / MANIFEST).is_file():
        return f"it has no {MANIFEST}" if path.exists() else "it doesn't exist"
    files = _read_manifest(path / MANIFEST)
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes, its {MANIFEST} says {size}"
    for name, chunks in checksums(path, {name: size for name, (size, _) in files.items()}, rank, ranks).items():
        if any(files[name][1][chunk] != value for chunk, value in chunks.items()):
            return f"{name} doesn't match its checksum"
    return None


def _read_manifest(path: Path) -> dict[str, tuple[int, list[int]]]:
    """Size and sums of each file. Raises FileError for anything that no save has written."""
    raw = read_json(path)
    _check_format(path, raw.get("format"))
    try:
        files = {name: (entry["bytes"], entry["crc32"]) for name, entry in raw["files"].items()}
        is_sound = raw["chunk_bytes"] == CHUNK_BYTES and STATE in files
        is_sound &= all(len(sums) == _num_chunks(size) and not _leaves(name) for name, (size, sums) in files.items())
    except (KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise FileError(f"{path} is garbled: it isn't as it was written")
    return files


def _leaves(name: str) -> bool:
    """Whether a name leads out of its directory."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def _check_format(path: Path, found: Any) -> None:
    if found != FORMAT:
        raise FileError(
            f"{path}: format {found!r} is not the one that this version reads ({FORMAT}); "
            "use the version of mpitp that wrote it"
        )


def _refuse_newer_format(path: Path) -> None:
    for name in (MANIFEST, STATE):
        try:
            found = read_json(path / name).get("format")
        except FileError:
            continue  # damage, which is another matter
        if type(found) is int and found > FORMAT:
            _check_format(path / name, found)


def _sizes(directory: Path) -> dict[str, int]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _num_chunks(size: int) -> int:
    return max(1, -(-size // CHUNK_BYTES))


def _crc(path: Path, chunk: int) -> int:
    value, left = 0, CHUNK_BYTES
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(chunk * CHUNK_BYTES)
            while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
                value = zlib.crc32(buffer[:count], value)
                left -= count
    except OSError as error:
        raise os_failure("read", path, error) from error
    return value


def _copied(array: Any) -> np.ndarray:
    host = to_host(array)
    return host.copy() if host is array else host


def _create_files(directory: Path, stem: str, shards: Shards) -> None:
    for name, tensors in shards.items():
        create_file(directory / name, plan_file(tensors))
    if len(shards) > 1:
        write_json(directory / f"{stem}.safetensors.index.json", index_of(shards))


def _step_of(path: Path, prefix: str = "") -> int:
    """The step of a directory's name behind `prefix`; -1: it isn't a checkpoint's."""
    digits = path.name.removeprefix(f"{prefix}step-")
    return int(digits) if digits.isdecimal() else -1


def _name(step: int) -> str:
    return f"step-{step:08}"
