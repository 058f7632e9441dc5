"""A Hugging Face directory whose matrices are rounded to 8 or 4 bits (`ops/groupwise.py`)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.hf import MODEL_FILES, expected_tensors, index_of, plan_shards
from mpitp.checkpoint.hf_directory import INDEX, read_config
from mpitp.checkpoint.load import load_config, load_model
from mpitp.checkpoint.safetensors_file import SafetensorsWriter, create_file
from mpitp.checkpoint.safetensors_header import plan_file
from mpitp.comm.serial import SerialGroup
from mpitp.errors import ConfigError
from mpitp.files import os_failure, publishing, write_json
from mpitp.layers.expert_matrices import SCALES
from mpitp.layers.site import make_site
from mpitp.models import CausalLM, abstract_model, config_from_hf
from mpitp.models.groupwise import KEY, grouping_entry, scales_of
from mpitp.models.names import HfPiece
from mpitp.ops.groupwise import Grouping, quantise

DOCUMENTS = ("*.json", "*.jinja", "*.model", "*.txt")  # beside the weights: the tokenizer's files and the like
Kept = tuple[np.ndarray, np.ndarray]  # codes and scales
_CODES = {np.dtype(np.int8): "I8", np.dtype(np.uint8): "U8"}


def round_weights(
    source: str | Path,
    directory: str | Path,
    grouping: Grouping,
    *,
    kept: Callable[[str], Kept | None] = lambda tensor: None,
    overwrite: bool = False,
    progress: Callable[[int], object] = lambda elements: None,
    start: Callable[[int], object] = lambda total: None,
) -> dict[str, Any]:
    """Write `directory`, the model of `source` with its matrices rounded and its vectors as float32; the new config.

    Weights that have been rounded in this way before (of a GGUF file in Q8_0 or Q4_0, say) keep their codes and scales.
    kept: of a matrix's name, its codes and scales in `grouping` where these are known; tables are rounded all the same.
    start is called with the number of elements, progress with those of each matrix. Nothing is left behind on an error.
    Raises FileError and ConfigError for a model that can't be read or rounded.
    """
    raw = read_config(source)
    config = {**raw, KEY: grouping_entry(grouping)}
    rounded = _abstract(source, config)
    model = load_model(source, make_site(SerialGroup()))
    shards = plan_shards(expected_tensors(rounded), _stored_dtypes(rounded, grouping))
    start(sum(param.data.size for _, param in model.named_params()))
    with publishing(Path(directory), overwrite, MODEL_FILES) as staging:
        _copy_documents(Path(source), staging)
        write_json(staging / "config.json", config)
        if len(shards) > 1:
            write_json(staging / INDEX, index_of(shards))
        with contextlib.ExitStack() as stack:
            writers = {}
            for file, tensors in shards.items():
                layout = plan_file(tensors)
                create_file(staging / file, layout)
                writer = stack.enter_context(contextlib.closing(SafetensorsWriter(staging / file, layout)))
                writers.update(dict.fromkeys(tensors, writer))
            for name, values, starts in _rounded_tensors(model, rounded, grouping, kept, progress):
                writers[name].write(name, values, starts)
    return config


def _abstract(source: str | Path, config: dict[str, Any]) -> CausalLM:
    """The rounded model without memory. Raises ConfigError where the source can't be rounded."""
    if load_config(source).grouping is not None:
        raise ConfigError(f"{source}: its weights are rounded already; convert the model in floats")
    rounded = abstract_model(config_from_hf(config), make_site(SerialGroup()))
    if any(piece.transposed for piece in rounded.hf_pieces().values()):
        raise ConfigError(
            f"{source}: {config['model_type']} stores its matrices transposed; rounding them is not supported"
        )
    return rounded


def _stored_dtypes(rounded: CausalLM, grouping: Grouping) -> dict[str, str]:
    """How each tensor is stored: codes, scales in 16 bits (beside least values in 32), vectors as they are."""
    table, stored = rounded.hf_pieces(), {}
    codes = {name: param.data.dtype for name, param in rounded.named_params()}
    for name, param in rounded.named_params():
        kind = _CODES.get(param.data.dtype, "F32")
        if name.endswith(SCALES) and not (grouping.has_least and codes[name.removesuffix(SCALES)] == grouping.dtype):
            kind = "F16"
        pieces = [table[name, part.name] for part in param.placement.parts]
        stored.update({tensor: kind for piece in pieces for tensor in piece.tensors()})
    return stored


def _rounded_tensors(
    model: CausalLM,
    rounded: CausalLM,
    grouping: Grouping,
    kept: Callable[[str], Kept | None],
    progress: Callable[[int], object],
) -> Iterator[tuple[str, np.ndarray, list[int]]]:
    """What is written: a tensor's name, values, and where they begin in it."""
    table, dtypes = rounded.hf_pieces(), {name: param.data.dtype for name, param in rounded.named_params()}
    for name, param in model.named_params():
        scale = scales_of(name)
        for part, place in param.placement.places():
            for values, piece, of_scales in _matrices(param.data[place], table, (name, scale), part.name):
                starts = [piece.start] + [0] * (values.ndim - 1)
                if scale in dtypes:
                    is_table = dtypes[name] != grouping.dtype
                    known = None if is_table else kept(piece.tensor)
                    codes, scales = known or quantise(values, grouping.of_tables if is_table else grouping)
                    yield piece.tensor, codes, starts
                    yield of_scales.tensor, scales, starts
                else:
                    yield piece.tensor, values, starts
                progress(values.size)


def _matrices(
    values: np.ndarray, table: Mapping[tuple[str, str], HfPiece], names: tuple[str, str], part: str
) -> Iterator[tuple[np.ndarray, HfPiece, HfPiece]]:
    """A part as the file has it, each expert's by itself, with where it and its scales lie (the same, where it has
    none).
    """
    piece = table[names[0], part]
    scales = table.get((names[1], part), piece)
    if not piece.stacked:
        yield values, piece, scales
    for number in range(piece.stacked):
        yield values[number], piece.of_expert(number), scales.of_expert(number)


def bits_a_weight(grouping: Grouping) -> float:
    """Stored bits of a weight, its part of a scale counted."""
    return grouping.bits + (64 if grouping.has_least else 16) / grouping.size


def _copy_documents(source: Path, staging: Path) -> None:
    left_out = {"config.json", INDEX}
    for path in sorted(path for pattern in DOCUMENTS for path in source.glob(pattern) if path.name not in left_out):
        try:
            shutil.copyfile(path, staging / path.name)
        except OSError as error:
            raise os_failure("copy", path, error) from error
