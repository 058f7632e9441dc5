"""A Llama-type GGUF file to a Hugging Face directory, tensor by tensor, so that memory stays small."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitp.checkpoint.hf import INDEX, MAX_SHARD_BYTES, MODEL_FILES, expected_tensors, index_of, plan_shards
from mpitp.checkpoint.safetensors_file import STORED_NAMES, SafetensorsWriter, create_file, plan_file
from mpitp.comm.serial import SerialGroup
from mpitp.convert.gguf_file import GgufFile
from mpitp.convert.gguf_model import architecture_of, config_from_gguf, halves_from_pairs, hf_names, is_rotated
from mpitp.convert.gguf_tokenizer import special_ids, tokenizer_from_gguf
from mpitp.data.tokenizer import check_fits, save_tokenizer
from mpitp.errors import ConfigError, FileError
from mpitp.files import publishing, write_json
from mpitp.models import build_model, config_from_hf

BAND_ROWS = 1024  # rows dequantised at a time, in whole heads


def convert_gguf(
    source: str | Path,
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
    file = GgufFile(source)
    ids = special_ids(file)
    config = config_from_gguf(file) | ids | {"torch_dtype": dtype}
    names, tokenizer = hf_names(file), tokenizer_from_gguf(file)
    shapes = {names[name]: shape for name, shape in file.shapes().items() if name in names}
    _check_shapes(file, config, shapes)
    check_fits(tokenizer, config["vocab_size"], str(source))
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
            writer = SafetensorsWriter(staging / shard, layout)
            try:
                for name in [name for name in names if names[name] in tensors]:
                    _write_tensor(file, name, names[name], config["head_dim"], writer, progress)
            finally:
                writer.close()
    return config


def _write_tensor(
    file: GgufFile, name: str, hf_name: str, head_dim: int, writer: SafetensorsWriter, progress: Callable[[int], object]
) -> None:
    rotated = is_rotated(name) and architecture_of(file).interleaved
    band = max(1, BAND_ROWS // head_dim) * head_dim
    for first, rows in file.rows(name, band):
        writer.write(hf_name, halves_from_pairs(rows, head_dim) if rotated else rows, 0, first)
        progress(rows.size)


def _check_shapes(file: GgufFile, config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]]) -> None:
    """The tensors must be those that the model of this config has; the model's own arrays are never touched."""
    try:
        model = build_model(config_from_hf(config), SerialGroup())
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
