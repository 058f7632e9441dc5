"""The header of a safetensors file: read strictly, and planned for a file that is to be written.

The format (https://huggingface.co/docs/safetensors): eight bytes give the length N of the header as a little-endian
unsigned integer; N bytes of UTF-8 JSON follow that begin with `{` and may end in spaces; then come the tensors' bytes,
C-ordered and little-endian. The header maps each name to `dtype`, `shape` and `data_offsets` [begin, end), counted
from the end of the header, and `__metadata__` to a map of strings. Names don't repeat; tensors leave no gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.errors import FileError
from mpitp.files import os_failure

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_COUNT, MOST_DIMS = 2**63, 64
LFS_POINTER = b"version https://git-lfs"

ELEMENT_BYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: its stored dtype (such as "BF16"), its shape, and its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Length in the file."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to be written: its header (with the eight bytes before it), where each tensor goes, and its whole size."""

    header: bytes
    tensors: dict[str, TensorInfo]
    size: int


def plan_file(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> FilePlan:
    """The plan of a file that holds {name: (stored dtype such as "BF16", shape)}, in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # readers of Hugging Face files ask for this word
    begin = 0
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        end = begin + math.prod(shape) * ELEMENT_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of eight
    data_start = 8 + len(text)
    infos = {
        name: TensorInfo(entry["dtype"], tuple(entry["shape"]), data_start + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return FilePlan(len(text).to_bytes(8, "little") + text, infos, data_start + begin)


def read_header_bytes(path: Path) -> bytes:
    """All bytes before the tensors."""
    try:
        with open(path, "rb") as file:
            length = file.read(8)
            return length + file.read(int.from_bytes(length, "little"))
    except OSError as error:
        raise os_failure("read", path, error) from error


def read_header(path: Path, descriptor: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors by name, and the metadata, of an open file. Raises FileError for what breaks the format."""
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, 64, 0)
    if start.startswith(LFS_POINTER):
        raise FileError(f"{path} is a git-lfs pointer, not the file itself: fetch it with `git lfs pull`")
    if len(start) < 8:
        raise FileError(f"{path} is no safetensors file: it has {size} bytes, the length of the header alone takes 8")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise FileError(
            f"{path} is no safetensors file: its first 8 bytes claim a header of {length} bytes, the limit is "
            f"{MAX_HEADER_BYTES}"
        )
    if 8 + length > size:
        raise FileError(f"{path} is truncated: its header should have {length} bytes, the whole file has {size}")
    return _parse_header(path, os.pread(descriptor, length, 8), size - 8 - length)


def _parse_header(path: Path, text: bytes, data_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    if not text.startswith(b"{"):
        raise FileError(f"{path} is no safetensors file: its header must begin with {{, but begins with {text[:1]!r}")
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(path, pairs))
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: the safetensors header is not JSON: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError(f"{path}: __metadata__ in the safetensors header must map names to strings")
    spans = sorted((_parse_entry(path, name, entry), name) for name, entry in header.items())
    position = 0
    for (begin, end, _, _), name in spans:
        if begin != position:
            raise FileError(
                f"{path}: tensor {name} begins at byte {begin} of the data, expected {position}: tensors must "
                "follow one another without gaps or overlaps"
            )
        position = end
    if position != data_bytes:
        what = "is truncated" if position > data_bytes else "has bytes that belong to no tensor"
        raise FileError(f"{path} {what}: its tensors take {position} bytes, the file holds {data_bytes}")
    data_start = 8 + len(text)
    return {name: TensorInfo(dtype, shape, data_start + begin) for (begin, _, dtype, shape), name in spans}, metadata


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of one tensor."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileError(f"{path}: the entry of tensor {name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise FileError(f"{path}: tensor {name} has the unknown dtype {dtype!r}; known are {', '.join(ELEMENT_BYTES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > MOST_DIMS:
        raise FileError(
            f"{path}: shape and data_offsets of tensor {name} must be lists of whole numbers, not below 0 or "
            f"above 2^63, and of at most {MOST_DIMS} dims"
        )
    needed = math.prod(shape) * ELEMENT_BYTES[dtype]
    if offsets[1] - offsets[0] != needed:
        raise FileError(
            f"{path}: tensor {name} ({dtype} {list(shape)}) needs {needed} bytes, its data_offsets {offsets} span "
            f"{offsets[1] - offsets[0]}"
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < MOST_COUNT for x in value)


def _without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise FileError(f"{path}: the safetensors header names {twice} twice")
    return result
