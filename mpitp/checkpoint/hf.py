"""Hugging Face model directories: opened strictly, read by slices, written in parallel by all ranks.

A directory holds `config.json` and the weights: `model.safetensors`, or several files and the index
`model.safetensors.index.json` that maps each tensor to its file. Names and shapes are global, so the layout that wrote
a directory leaves no trace in it.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from mpitp.backend.arrays import array_module, from_host, to_host
from mpitp.checkpoint.chunk_sums import ChunkSums
from mpitp.checkpoint.safetensors_file import (
    ELEMENT_BYTES,
    STORED_NAMES,
    SafetensorsFile,
    SafetensorsWriter,
    create_file,
    plan_file,
)
from mpitp.checkpoint.together import on_first_rank, together
from mpitp.comm.group import Group
from mpitp.errors import FileError, UsageError
from mpitp.files import discard, make_staging, publish, read_json, write_file, write_json
from mpitp.layers.param import Param, Part
from mpitp.models.names import HfPiece

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL = "model"  # the word that the weights' files begin with
MAX_SHARD_BYTES = 50_000_000_000
# what a model directory may hold and still be replaced when overwriting is asked
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
FIRST_FEW = 5
COPY_ROWS = 1024

Shape = tuple[int, ...]
Shards = dict[str, dict[str, tuple[str, Shape]]]  # file: {tensor: (stored dtype, shape)}


class NamedModel(Protocol):
    """What a model offers to be loaded and saved."""

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """Every parameter once, in a fixed order."""

    def hf_pieces(self) -> Mapping[tuple[str, str], HfPiece]:
        """Where the part (parameter name, part name) lies in the files."""


def read_config(directory: str | Path) -> dict[str, Any]:
    """The directory's config.json."""
    path = _existing_directory(directory) / "config.json"
    if not path.is_file():
        raise FileError(f"{directory} holds no config.json, so it is no Hugging Face model directory")
    return read_json(path)


def read_generation_config(directory: str | Path) -> dict[str, Any]:
    """The directory's generation_config.json; empty where there is none."""
    path = Path(directory) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


class HfWeights:
    """The tensors of a Hugging Face directory, by name, whichever file they are in. Opening reads headers only."""

    def __init__(self, directory: str | Path, stem: str = MODEL) -> None:
        self.directory = _existing_directory(directory)
        self.index = f"{stem}.safetensors.index.json"
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        self._stored_name: dict[str, str] = {}
        try:
            if (self.directory / f"{stem}.safetensors").is_file():
                self._add_file(f"{stem}.safetensors")
            elif (self.directory / self.index).is_file():
                self._add_indexed()
            else:
                raise FileError(_no_weights_message(self.directory, stem))
        except FileError:
            self.close()
            raise

    def shapes(self) -> dict[str, Shape]:
        """Name and stored shape of every tensor."""
        return {name: file.tensors[self._stored_name[name]].shape for name, file in self._file_of.items()}

    def read(self, name: str, out: np.ndarray, dim: int = 0, start: int = 0) -> None:
        """Fill `out` with rows of a tensor: see `SafetensorsFile.read`."""
        self._file_of[name].read(self._stored_name[name], out, dim, start)

    def align_names(self, expected: Mapping[str, Shape]) -> None:
        """Let tensors saved from the bare model be found: "wte.weight" as "transformer.wte.weight".

        Such files leave out the first word of all names but that of the head. A word is supplied only where no stored
        name has it and the longer name is an expected one.
        """
        stored_words = {name.partition(".")[0] for name in self._file_of}
        for word in sorted({name.partition(".")[0] for name in expected} - stored_words):
            for name in [name for name in self._file_of if f"{word}.{name}" in expected and name not in expected]:
                self._file_of[f"{word}.{name}"] = self._file_of.pop(name)
                self._stored_name[f"{word}.{name}"] = self._stored_name.pop(name)

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
        lines = [f"{len(names)} {what}: {_first_few(names)}" for what, names in differences.items() if names]
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

    def _add_indexed(self) -> None:
        path = self.directory / self.index
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise FileError(f"{path} must map tensor names to file names under weight_map")
        files = sorted(set(weight_map.values()))
        if outside := [file for file in files if Path(file).name != file]:
            raise FileError(f"{path} names a file outside its directory: {outside[0]}")
        missing = [file for file in files if not (self.directory / file).is_file()]
        if missing:
            raise FileError(
                f"{self.directory} is an incomplete download: {len(missing)} of the {len(files)} files that "
                f"{self.index} names are missing: {_first_few(missing)}"
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
                f"{self.index} names for them: {_first_few(absent)}"
            )


def expected_tensors(model: NamedModel) -> dict[str, Shape]:
    """Name and shape, as stored, of every tensor that the model's parameters are pieces of."""
    expected: dict[str, Shape] = {}
    for param, part, _, piece in _pieces(model):
        shape = list(param.spec.global_shape(part))
        shape[param.spec.dim] = part.size if piece.size is None else piece.size
        stored = tuple(reversed(shape)) if piece.transposed else tuple(shape)
        assert expected.setdefault(piece.tensor, stored) == stored, (
            f"{piece.tensor}: {expected[piece.tensor]}, {stored}"
        )
    return expected


def load_params(
    model: NamedModel,
    directory: str | Path,
    ignorable: Sequence[str] = (),
    copies: Mapping[str, str] | None = None,
    stem: str = MODEL,
) -> None:
    """Fill the model's parameters from a Hugging Face directory; each rank reads only the rows it holds.

    Names and shapes are checked first. Values are converted to each parameter's dtype. copies: tensors that may be
    stored although they are another one's equal (a tied head); one that differs is a FileError. stem: the word that
    the files' names begin with.
    """
    with HfWeights(directory, stem) as weights:
        expected = expected_tensors(model)
        weights.align_names(expected)
        stored_copies = {copy: of for copy, of in (copies or {}).items() if copy in weights.shapes()}
        weights.check_tensors({**expected, **{copy: expected[of] for copy, of in stored_copies.items()}}, ignorable)
        for param, part, rows, piece in _pieces(model):
            view = param.spec.view(param.data, rows)
            if view.size:
                _read_piece(weights, param, part, piece, view)
                for copy in [copy for copy, of in stored_copies.items() if of == piece.tensor]:
                    _check_copy(weights, param, part, replace(piece, tensor=copy), rows)


def save_model(
    model: NamedModel,
    directory: str | Path,
    group: Group,
    *,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    save_dtype: str = "float32",
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory, a collective over the ranks that hold the model: each writes the rows it owns.

    Everything goes into a directory beside the target, which takes the target's place, when whole, by one rename. When
    any rank fails, nothing is left behind and all ranks raise the same error. extra_files: name to content, such as the
    tokenizer's. save_dtype: "float32", "float64", "bfloat16" or "float16".
    """
    if save_dtype not in STORED_NAMES:
        raise UsageError(f"save_dtype={save_dtype!r}: expected one of {', '.join(STORED_NAMES)}")
    shapes = all_expected(model, group)
    shards = plan_shards(shapes, STORED_NAMES[save_dtype], max_shard_bytes)
    target = Path(directory)
    documents = {"config.json": with_dtype(config, save_dtype), "generation_config.json": generation_config}
    staging = on_first_rank(group, lambda: _prepare(target, shards, documents, extra_files or {}, overwrite))
    try:
        together(group, lambda: write_owned(model, staging, shards))
        on_first_rank(group, lambda: publish(staging, target))
    except BaseException:
        if group.rank == 0:
            discard(staging)
        raise


def plan_shards(shapes: Mapping[str, Shape], dtype: str, max_bytes: int = MAX_SHARD_BYTES, stem: str = MODEL) -> Shards:
    """Deal tensors, in the order of their names, to files of at most `max_bytes`: {file: {tensor: (dtype, shape)}}."""
    shards: list[dict[str, tuple[str, Shape]]] = [{}]
    filled = 0
    for name in sorted(shapes):
        size = math.prod(shapes[name]) * ELEMENT_BYTES[dtype]
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shapes[name])
        filled += size
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _pieces(model: NamedModel) -> Iterator[tuple[Param, Part, slice, HfPiece]]:
    """Each part of each parameter with its rows of the local array and its place in the files."""
    table = model.hf_pieces()
    for name, param in model.named_params():
        for part, rows in param.spec.local_parts():
            yield param, part, rows, table[name, part.name]


def _read_piece(weights: HfWeights, param: Param, part: Part, piece: HfPiece, view: Any) -> None:
    """Read the held rows of one part into its place in the parameter, over host memory where it lives on a device."""
    module = array_module(param.data)
    host = view if module is np else np.empty(view.shape, param.data.dtype)
    start, dim = piece.start + part.held.start, param.spec.dim
    if piece.transposed:
        weights.read(piece.tensor, host.T, host.ndim - 1 - dim, start)
    else:
        weights.read(piece.tensor, host, dim, start)
    if module is not np:
        view[...] = from_host(host, module)


def _check_copy(weights: HfWeights, param: Param, part: Part, piece: HfPiece, rows: slice) -> None:
    """Compare a stored copy with the parameter, some rows at a time."""
    for first in range(rows.start, rows.stop, COPY_ROWS):
        band = slice(first, min(first + COPY_ROWS, rows.stop))
        held = part.held[band.start - rows.start : band.stop - rows.start]
        ours = to_host(param.spec.view(param.data, band))
        theirs = np.empty_like(ours)
        weights.read(piece.tensor, theirs, param.spec.dim, piece.start + held.start)
        if not np.array_equal(ours, theirs, equal_nan=True):
            raise FileError(
                f"{weights.directory}: config.json says that {piece.tensor} is tied to another one, but the files hold "
                "different values for the two; set tie_word_embeddings to false, or remove the tensor"
            )


def all_expected(model: NamedModel, group: Group) -> dict[str, Shape]:
    """The tensors of all ranks together; every element of each must be owned by exactly one rank."""
    shapes: dict[str, Shape] = {}
    owned: dict[str, int] = {}
    for theirs, counts in group.all_gather_objects((expected_tensors(model), _owned_elements(model))):
        shapes.update(theirs)
        for name, count in counts.items():
            owned[name] = owned.get(name, 0) + count
    wrong = [name for name, shape in shapes.items() if owned[name] != math.prod(shape)]
    assert not wrong, f"elements owned by no rank or by several: {_first_few(wrong)}"
    return shapes


def _owned_elements(model: NamedModel) -> dict[str, int]:
    counts: dict[str, int] = {}
    for param, part, _, piece in _pieces(model):
        inner = math.prod(param.spec.global_shape(part)) // part.size if part.size else 0
        counts[piece.tensor] = counts.get(piece.tensor, 0) + len(part.owned) * inner
    return counts


def _prepare(
    target: Path,
    shards: Mapping[str, Mapping[str, tuple[str, Shape]]],
    documents: Mapping[str, Mapping[str, Any] | None],
    extra_files: Mapping[str, bytes],
    overwrite: bool,
) -> Path:
    """The first rank's part before the weights: a staging directory with the small files and the weights' space."""
    staging = make_staging(target, overwrite, MODEL_FILES)
    try:
        for name, content in extra_files.items():
            assert Path(name).name == name, f"{name} is no plain file name"
            write_file(staging / name, content)
        for name, document in documents.items():
            if document is not None:
                write_json(staging / name, document)
        for name, tensors in shards.items():
            create_file(staging / name, plan_file(tensors))
        if len(shards) > 1:
            write_json(staging / INDEX, index_of(shards))
    except BaseException:
        discard(staging)
        raise
    return staging


def with_dtype(config: Mapping[str, Any], save_dtype: str) -> dict[str, Any]:
    """The config with the stored dtype under the key that it uses: `dtype`, or `torch_dtype` as older files have it."""
    return {**config, "dtype" if "dtype" in config else "torch_dtype": save_dtype}


def index_of(shards: Mapping[str, Mapping[str, tuple[str, Shape]]]) -> dict[str, Any]:
    """The content of the index of several weight files."""
    sizes = [math.prod(shape) * ELEMENT_BYTES[dtype] for shard in shards.values() for dtype, shape in shard.values()]
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}


def write_owned(
    model: NamedModel,
    staging: Path,
    shards: Mapping[str, Mapping[str, tuple[str, Shape]]],
    sums: Mapping[str, ChunkSums] | None = None,
    close: Callable[[SafetensorsWriter], Any] = SafetensorsWriter.close,
) -> None:
    """Write the rows that this rank owns of every parameter.

    `sums`: what gathers the checksums of each file. `close`: given each file that is written, to bring it to the disk.
    """
    table = model.hf_pieces()
    for file, tensors in shards.items():
        writer = SafetensorsWriter(staging / file, plan_file(tensors), None if sums is None else sums[file])
        try:
            for name, param in model.named_params():
                for part, rows in param.spec.owned_rows():
                    piece = table[name, part.name]
                    if len(part.owned) and piece.tensor in tensors:
                        _write_piece(writer, param, part, piece, to_host(param.spec.view(param.data, rows)))
        finally:
            close(writer)


def _write_piece(writer: SafetensorsWriter, param: Param, part: Part, piece: HfPiece, host: np.ndarray) -> None:
    start, dim = piece.start + part.owned.start, param.spec.dim
    if piece.transposed:
        writer.write(piece.tensor, host.T, host.ndim - 1 - dim, start)
    else:
        writer.write(piece.tensor, host, dim, start)


def _existing_directory(directory: str | Path) -> Path:
    path = Path(directory)
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "doesn't exist"
        raise FileError(f"model directory {directory} {what}")
    return path


def _no_weights_message(directory: Path, stem: str) -> str:
    if stem != MODEL:
        return f"{directory} holds neither {stem}.safetensors nor an index of several such files"
    pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{directory} holds {pickled[0]} but no {WEIGHTS}: pickled weights can run code and aren't read; save the "
            "model as safetensors (in transformers: save_pretrained) and use that directory"
        )
    return f"{directory} holds neither {WEIGHTS} nor {INDEX}"


def _first_few(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > FIRST_FEW else ""
    return ", ".join(names[:FIRST_FEW]) + more
