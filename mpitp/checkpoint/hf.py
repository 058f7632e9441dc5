"""A model's parameters from and to Hugging Face directories: read by slices, written in parallel by all ranks.

Names and shapes are global, so the layout that wrote a directory leaves no trace in it. How a directory is laid out and
opened stands in `hf_directory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host, to_host
from mpitp.checkpoint.chunk_sums import ChunkSums
from mpitp.checkpoint.hf_directory import INDEX, MODEL, HfWeights, Shape, first_few
from mpitp.checkpoint.in_place import put_in_place
from mpitp.checkpoint.safetensors_file import STORED_NAMES, SafetensorsWriter, create_file
from mpitp.checkpoint.safetensors_header import ELEMENT_BYTES, plan_file
from mpitp.checkpoint.together import on_first_rank, together
from mpitp.comm.group import Group
from mpitp.errors import FileError, UsageError
from mpitp.files import discard, folders_to_make, make_staging, publish, remove_empty, write_file, write_json
from mpitp.layers.param import Param
from mpitp.layers.placement import Box, Index, Part
from mpitp.models.known_keys import ARCHITECTURES
from mpitp.models.names import HfPiece

MAX_SHARD_BYTES = 50_000_000_000
# what a model directory may hold and still be replaced when overwriting is asked
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
COPY_ROWS = 1024

Shards = dict[str, dict[str, tuple[str, Shape]]]  # file: {tensor: (stored dtype, shape)}


class NamedModel(Protocol):
    """What a model offers to be loaded and saved."""

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """Every parameter once, in a fixed order."""

    def hf_pieces(self) -> Mapping[tuple[str, str], HfPiece]:
        """Where the part (parameter name, part name) lies in the files."""


def expected_tensors(model: NamedModel) -> dict[str, Shape]:
    """Name and shape, as stored, of every tensor that the model's parameters are pieces of."""
    expected: dict[str, Shape] = {}
    for _, stored_part in _pieces(model):
        piece, shape, fused = stored_part.piece, list(stored_part.part.shape), stored_part.fused
        shape[fused] = shape[fused] if piece.size is None else piece.size
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
    *,
    in_place: bool = False,
) -> None:
    """Fill the model's parameters from a Hugging Face directory; each rank reads only the rows it holds.

    Names and shapes are checked first; a pipeline's other stages check theirs. Values are converted to each parameter's
    dtype. copies: tensors that may be stored beside another one that they equal (a tied head), or in its place; one
    that differs is a FileError. stem: the word that the files' names begin with. in_place: parameters that the files
    have as they are wanted stay there (`in_place.py`).
    """
    with HfWeights(directory, stem) as weights:
        expected = expected_tensors(model)
        everyones = {name for piece in model.hf_pieces().values() for name in piece.tensors()}
        elsewhere = (everyones | {*(copies or {})}) - set(expected)
        weights.align_names(expected)
        weights.take_for(copies or {})
        stored_copies = {copy: of for copy, of in (copies or {}).items() if copy in weights.shapes() and of in expected}
        weights.check_tensors(
            {**expected, **{copy: expected[of] for copy, of in stored_copies.items()}}, (*ignorable, *elsewhere)
        )
        for param, pieces in _by_param(model):
            boxes = [box for stored in pieces for box in _boxes(stored, param.data[stored.place])] if in_place else []
            is_there = in_place and put_in_place(weights, param, boxes)
            for stored in pieces:
                view = param.data[stored.place]
                if view.size and not is_there:
                    _read_piece(weights, stored, view)
                for copy in [copy for copy, of in stored_copies.items() if of == stored.piece.tensor and view.size]:
                    _check_copy(weights, stored.part, replace(stored.piece, tensor=copy), view)


@dataclass(frozen=True, slots=True)
class Documents:
    """What stands beside the weights: the two configs, and other small files by name, such as the tokenizer's."""

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None = None
    extra_files: Mapping[str, bytes] = field(default_factory=dict)


def save_model(
    model: NamedModel,
    directory: str | Path,
    group: Group,
    documents: Documents,
    *,
    save_dtype: str = "float32",
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory, a collective over the ranks that hold the model: each writes the rows it owns.

    Everything goes into a directory beside the target, which takes the target's place, when whole, by one rename. When
    any rank fails, nothing is left behind and all ranks raise the same error. save_dtype: "float32", "float64",
    "bfloat16" or "float16".
    """
    if save_dtype not in STORED_NAMES:
        raise UsageError(f"save_dtype={save_dtype!r}: expected one of {', '.join(STORED_NAMES)}")
    shapes = all_expected(model, group)
    shards = plan_shards(shapes, STORED_NAMES[save_dtype], max_shard_bytes)
    target = Path(directory)
    made = folders_to_make(target) if group.rank == 0 else []
    staging = on_first_rank(group, lambda: _prepare(target, shards, documents, save_dtype, overwrite))
    try:
        together(group, lambda: write_owned(model, staging, shards))
        on_first_rank(group, lambda: publish(staging, target))
    except BaseException:
        if group.rank == 0:
            discard(staging)
            remove_empty(made)
        raise


def plan_shards(
    shapes: Mapping[str, Shape],
    dtype: str | Mapping[str, str],
    max_bytes: int = MAX_SHARD_BYTES,
    stem: str = MODEL,
) -> Shards:
    """Deal tensors, in the order of their names, to files of at most `max_bytes`: {file: {tensor: (dtype, shape)}}.

    `dtype`: as stored, of all tensors or of each.
    """
    shards: list[dict[str, tuple[str, Shape]]] = [{}]
    filled = 0
    for name in sorted(shapes):
        stored = dtype if isinstance(dtype, str) else dtype[name]
        size = math.prod(shapes[name]) * ELEMENT_BYTES[stored]
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = (stored, shapes[name])
        filled += size
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a parameter, or one expert of it, as a tensor of the files: where it lies in the local array."""

    part: Part
    place: tuple[Any, ...]
    piece: HfPiece
    fused: int

    @classmethod
    def each(cls, param: Param, part: Part, place: Index, piece: HfPiece, experts: range) -> Iterator[Stored]:
        """The part; where it is a stack of experts, these of them. `place`: of the part's box in the local array."""
        fused = param.placement.fused
        if not piece.stacked:
            yield cls(part, place, piece, fused)
            return
        rest = (*place[1:], *(slice(None) for _ in range(len(part.dims) - len(place))))
        for expert in experts:
            where = (expert - part.held[0].start, *rest)
            yield cls(Part(part.name, part.dims[1:]), where, piece.of_expert(expert), fused - 1)


def _pieces(model: NamedModel) -> Iterator[tuple[Param, Stored]]:
    """Each part of each parameter with its place in the local array and its place in the files."""
    table = model.hf_pieces()
    for name, param in model.named_params():
        for part, place in param.placement.places():
            for stored in Stored.each(param, part, place, table[name, part.name], part.held[0]):
                yield param, stored


def _by_param(model: NamedModel) -> Iterator[tuple[Param, list[Stored]]]:
    """The same, parameter by parameter."""
    for _, neighbours in groupby(_pieces(model), key=lambda pair: id(pair[0])):
        pairs = list(neighbours)
        yield pairs[0][0], [stored for _, stored in pairs]


def _owned_pieces(model: NamedModel) -> Iterator[tuple[Param, Stored]]:
    """The same of what this rank owns."""
    table = model.hf_pieces()
    for name, param in model.named_params():
        for part, place in param.placement.owned():
            for stored in Stored.each(param, part, place, table[name, part.name], part.owned[0]):
                yield param, stored


def _read_piece(weights: HfWeights, stored: Stored, view: Any) -> None:
    """Read the held box of one part into its place in the parameter, over host memory where it lives on a device."""
    module = array_module(view)
    host = view if module is np else np.empty(view.shape, view.dtype)
    for tensor, target, starts in _boxes(stored, host):
        weights.read(tensor, target, starts)
    if module is not np:
        view[...] = from_host(host, module)


def _boxes(stored: Stored, local: Array) -> Iterator[tuple[str, Array, list[int]]]:
    """What a part's place in the parameter is read from: tensors, where each is read to, where in the tensor."""
    piece = stored.piece
    for starts, place in _stored_boxes(stored.part.held, stored.fused, piece):
        yield piece.tensor, local[place].T if piece.transposed else local[place], starts


def _stored_boxes(box: Box, fused: int, piece: HfPiece) -> Iterator[tuple[list[int], Index]]:
    """The boxes of the stored tensor that a box of a part is made of: where each begins, its place in the part's."""
    for first, rows in piece.runs(box[fused]):
        starts = [first if dim == fused else own.start for dim, own in enumerate(box)]
        place = [slice(None)] * len(box)
        place[fused] = slice(rows.start - box[fused].start, rows.stop - box[fused].start)
        yield starts[::-1] if piece.transposed else starts, tuple(place)


def _check_copy(weights: HfWeights, part: Part, piece: HfPiece, view: Any) -> None:
    """Compare a stored copy (of a table of rows) with the parameter, some rows at a time."""
    starts = [rows.start for rows in part.held]
    for first in range(0, len(view), COPY_ROWS):
        ours = to_host(view[first : first + COPY_ROWS])
        theirs = np.empty_like(ours)
        weights.read(piece.tensor, theirs, [starts[0] + first, *starts[1:]])
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
    assert not wrong, f"elements owned by no rank or by several: {first_few(wrong)}"
    return shapes


def _owned_elements(model: NamedModel) -> dict[str, int]:
    counts = dict.fromkeys(expected_tensors(model), 0)
    for _, stored in _owned_pieces(model):
        counts[stored.piece.tensor] += math.prod(map(len, stored.part.owned))
    return counts


def _prepare(
    target: Path,
    shards: Mapping[str, Mapping[str, tuple[str, Shape]]],
    documents: Documents,
    save_dtype: str,
    overwrite: bool,
) -> Path:
    """The first rank's part before the weights: a staging directory with the small files and the weights' space."""
    made = folders_to_make(target)
    staging = make_staging(target, overwrite, MODEL_FILES)
    try:
        for name, content in documents.extra_files.items():
            assert Path(name).name == name, f"{name} is no plain file name"
            write_file(staging / name, content)
        write_json(staging / "config.json", with_dtype(documents.config, save_dtype))
        if documents.generation_config is not None:
            write_json(staging / "generation_config.json", documents.generation_config)
        for name, tensors in shards.items():
            create_file(staging / name, plan_file(tensors))
        if len(shards) > 1:
            write_json(staging / INDEX, index_of(shards))
    except BaseException:
        discard(staging)
        remove_empty(made)
        raise
    return staging


def with_dtype(config: Mapping[str, Any], save_dtype: str) -> dict[str, Any]:
    """What is written of a config: with the stored dtype under one key (`dtype`, or `torch_dtype` as older files have
    it), and with the class that Hugging Face's tools look for.
    """
    key = "dtype" if "dtype" in config else "torch_dtype"
    others = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    name = ARCHITECTURES.get(str(config.get("model_type")))
    given = config.get("architectures")
    is_given = isinstance(given, list) and given and all(isinstance(word, str) for word in given)
    architectures = {} if is_given or name is None else {"architectures": [name]}
    return {**others, **architectures, key: save_dtype}


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
    for file, tensors in shards.items():
        writer = SafetensorsWriter(staging / file, plan_file(tensors), None if sums is None else sums[file])
        try:
            for param, stored in _owned_pieces(model):
                piece = stored.piece
                if piece.tensor in tensors:
                    host = to_host(param.data[stored.place])
                    for starts, where in _stored_boxes(stored.part.owned, stored.fused, piece):
                        box = host[where]
                        writer.write(piece.tensor, box.T if piece.transposed else box, starts)
        finally:
            close(writer)
