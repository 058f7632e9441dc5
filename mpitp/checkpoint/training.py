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

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.checkpoint.chunk_sums import Sums
from mpitp.checkpoint.existing import ASIDE, checkpoints, directory_name, step_of
from mpitp.checkpoint.hf import (
    NamedModel,
    Shards,
    all_expected,
    index_of,
    load_params,
    plan_shards,
    with_dtype,
    write_owned,
)
from mpitp.checkpoint.hf_directory import MODEL
from mpitp.checkpoint.manifest import MANIFEST, STATE, make_manifest, sums_of_chunks
from mpitp.checkpoint.safetensors_file import STORED_NAMES, SafetensorsWriter, create_file
from mpitp.checkpoint.safetensors_header import plan_file
from mpitp.checkpoint.together import gather_together, raise_together
from mpitp.comm.group import Group
from mpitp.errors import FileError
from mpitp.files import (
    discard,
    make_staging,
    publish,
    remove,
    sync_directory,
    sync_file,
    write_file,
    write_json,
)
from mpitp.layers.param import Param
from mpitp.models.names import HfPiece

OPTIMIZER = "optimizer"

Moments = Mapping[str, Mapping[str, Any]]  # kind ("exp_avg"): {parameter: array}


@dataclass(frozen=True, slots=True)
class ArraysAs:
    """Other arrays under a model's parameter names and specs, to be stored and loaded as its parameters are."""

    model: NamedModel
    arrays: Mapping[str, Any]

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """Each array as a parameter."""
        for name, param in self.model.named_params():
            yield name, Param(self.arrays[name], param.placement)

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
        self._params = [(name, Param(_copied(param.data), param.placement)) for name, param in model.named_params()]
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
        self.target, self.group, self.keep, self.contents = root / directory_name(step), group, keep, contents
        shapes = all_expected(contents.model, group)
        stored = STORED_NAMES[contents.dtype]
        self.plans = {(sub, stem): plan_shards(shapes, stored, stem=stem) for sub, stem, _ in contents.sets()}
        self.phases: list[Callable[[list[Any]], Any]] = [self._prepare, self._write, self._publish]
        self._staging: Path | None = None
        self._sizes: dict[str, int] = {}
        self._removal: threading.Thread | None = None
        self._unremoved: list[str] = []

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
            sums = {name: sums_of_chunks(size, pool) for name, size in self._sizes.items()}
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
        write_json(self._staging / MANIFEST, make_manifest(self._staging, self._sizes, shares))
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
            last = step_of(found[self.keep - 1])
            old += [path for path in root.glob(f"{ASIDE}step-*") if 0 <= step_of(path, ASIDE) <= last]
        for path in old:
            try:
                remove(path)
            except FileError as error:
                self._unremoved.append(f"{path.name} should go, but {error}")

    def wait_for_removal(self) -> list[str]:
        """Return when the oldest checkpoints are gone; a published save removes them while its caller goes on.

        What couldn't be removed is told in lines: it takes room, but the new checkpoint is whole.
        """
        if self._removal is not None:
            self._removal.join()
        return self._unremoved


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


def load_arrays(path: Path, model: NamedModel, moments: Moments) -> None:
    """Fill the model's parameters and the moments from a checkpoint; each rank reads the rows it holds."""
    load_params(model, path)
    for kind, arrays in moments.items():
        load_params(ArraysAs(model, arrays), path / OPTIMIZER, stem=kind)


def _sizes(directory: Path) -> dict[str, int]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _copied(array: Any) -> np.ndarray:
    host = to_host(array)
    return host.copy() if host is array else host


def _create_files(directory: Path, stem: str, shards: Shards) -> None:
    for name, tensors in shards.items():
        create_file(directory / name, plan_file(tensors))
    if len(shards) > 1:
        write_json(directory / f"{stem}.safetensors.index.json", index_of(shards))
