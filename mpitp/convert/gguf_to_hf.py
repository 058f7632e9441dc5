"""A Llama-type GGUF file to a Hugging Face directory, tensor by tensor, so that memory stays small."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.hf import MAX_SHARD_BYTES, MODEL_FILES, expected_tensors, index_of, plan_shards
from mpitp.checkpoint.hf_directory import INDEX
from mpitp.checkpoint.safetensors_file import STORED_NAMES, SafetensorsWriter, create_file
from mpitp.checkpoint.safetensors_header import plan_file
from mpitp.comm.serial import SerialGroup
from mpitp.convert.gguf_file import GgufFile
from mpitp.convert.gguf_model import architecture_of, config_from_gguf, halves_from_pairs, hf_names, is_rotated
from mpitp.convert.gguf_tokenizer import special_ids, tokenizer_from_gguf
from mpitp.data.tokenizer import check_fits, save_tokenizer
from mpitp.errors import ConfigError, FileError
from mpitp.files import publishing, write_json
from mpitp.layers.site import make_site
from mpitp.models import abstract_model, config_from_hf

BAND_ROWS = 1024  # rows dequantised at a time, in whole heads


def convert_gguf(
    source: str | Path | GgufFile,
    directory: str | Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], object] = lambda elements: None,
    start: Callable[[int], object] = lambda total: None,
) -> dict[str, Any]:
    """Write `directory` (config.json, generation_config.json, weights, tokenizer) from the GGUF file `source`.

    dtype: what weights are stored in. start is called with the number of elements to be written, progress with those of
    each band. Everything is checked before a byte is written; nothing is left behind on an error. Returns the config.
    Raises FileError for a file that is damaged or can't be converted.
    """
    file = source if isinstance(source, GgufFile) else GgufFile(source)
    ids = special_ids(file)
    config = config_from_gguf(file) | ids | {"torch_dtype": dtype}
    names, tokenizer = hf_names(file), tokenizer_from_gguf(file)
    shapes = {names[name]: shape for name, shape in file.shapes().items() if name in names}
    _check_shapes(file, config, shapes)
    check_fits(tokenizer, config["vocab_size"], str(file.path))
    start(sum(math.prod(shape) for shape in shapes.values()))
    shards = plan_shards(shapes, STORED_NAMES[dtype], max_shard_bytes)
    with publishing(Path(directory), overwrite, MODEL_FILES) as staging:
        write_json(staging / "config.json", config)
        write_json(staging / "generation_config.json", ids)
        save_tokenizer(tokenizer, staging)
        if len(shards) > 1:
            write_json(staging / INDEX, index_of(shards))
        for shard, tensors in shards.items():
            layout = plan_file(tensors)
            create_file(staging / shard, layout)
            with contextlib.closing(SafetensorsWriter(staging / shard, layout)) as writer:
                for name in [name for name in names if names[name] in tensors]:
                    _write_tensor(file, name, names[name], config["head_dim"], writer, progress)
    return config


def _write_tensor(
    file: GgufFile, name: str, hf_name: str, head_dim: int, writer: SafetensorsWriter, progress: Callable[[int], object]
) -> None:
    rotated = is_rotated(name) and architecture_of(file).interleaved
    band = max(1, BAND_ROWS // head_dim) * head_dim
    for first, rows in file.rows(name, band):
        if not np.isfinite(rows).all():
            raise FileError(f"{file.path}: {name} holds numbers that are not finite: the file is damaged")
        values = halves_from_pairs(rows, head_dim) if rotated else rows
        writer.write(hf_name, values, [first] + [0] * (rows.ndim - 1))
        progress(rows.size)


def _check_shapes(file: GgufFile, config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]]) -> None:
    """The tensors must be those that the model of this config has."""
    try:
        model = abstract_model(config_from_hf(config), make_site(SerialGroup()))
    except ConfigError as error:
        raise FileError(f"{file.path}: its metadata make no model: {error}") from error
    expected = expected_tensors(model)
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        needed, came = (list(shapes[name]) if name in shapes else "none" for shapes in (expected, found))
        raise FileError(
            f"{file.path}: {len(wrong)} tensors don't fit the metadata, the first is {name}: expected {needed}, "
            f"got {came}"
        )
