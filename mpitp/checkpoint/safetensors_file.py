"""The safetensors file format: headers read strictly, slices read and written without touching other bytes.

The format (https://huggingface.co/docs/safetensors): eight bytes give the length N of the header as a little-endian
unsigned integer; N bytes of UTF-8 JSON follow that begin with `{` and may end in spaces; then come the tensors' bytes,
C-ordered and little-endian. The header maps each name to `dtype`, `shape` and `data_offsets` [begin, end), counted
from the end of the header, and `__metadata__` to a map of strings. Names don't repeat; tensors leave no gaps.

Bytes are read and written at their positions (pread, pwrite), not through a memory map: what a rank doesn't need never
counts as its memory, and a file cut short while it is open is an error, not a crash.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from mpitp.checkpoint.chunk_sums import ChunkSums
from mpitp.errors import FileError
from mpitp.files import os_failure

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
BAND_BYTES = 4 << 20  # scratch memory of a read or a write
PAGE_BYTES = 4096
LFS_POINTER = b"version https://git-lfs"

ELEMENT_BYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}
FLOAT_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
STORED_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


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
class Layout:
    """A file to be written: its header (with the eight bytes before it), where each tensor goes, and its whole size."""

    header: bytes
    tensors: dict[str, TensorInfo]
    size: int


class SafetensorsFile:
    """An open safetensors file. Making one reads and checks the header only."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
            self.tensors, self.metadata = _read_header(self.path, self._descriptor)
        except OSError as error:
            self.close()
            raise os_failure("read", self.path, error) from error
        except FileError:
            self.close()
            raise

    def read(self, name: str, out: np.ndarray, dim: int = 0, start: int = 0) -> None:
        """Fill `out` with rows start .. start + out.shape[dim] along `dim` of tensor `name`, converted to out's dtype.

        `out` (float32 or float64) may have any strides: pass `x.T` to read into the transpose of x. Its other dims are
        the tensor's.
        """
        info = self.tensors[name]
        if info.dtype not in FLOAT_DTYPES:
            known = ", ".join(FLOAT_DTYPES)
            raise FileError(
                f"{self.path}: tensor {name} is stored as {info.dtype}; only {known} can be read as weights"
            )
        _check_slice(info.shape, out.shape, dim, start)
        for offset, stride_bytes, matrix in _matrices(info, out, dim, start):
            self._read_matrix(FLOAT_DTYPES[info.dtype], offset, stride_bytes, matrix)

    def close(self) -> None:
        """Give the file back; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _read_matrix(self, stored: np.dtype, offset: int, stride_bytes: int, out: np.ndarray) -> None:
        rows, cols = out.shape
        row_bytes = cols * stored.itemsize
        contiguous = row_bytes == stride_bytes or rows == 1
        if contiguous and out.dtype == stored and out.flags.c_contiguous:
            self._fill(out, offset)
            return
        # a segment shorter than a page costs as much as its whole page: read whole rows and pick
        whole_rows = contiguous or row_bytes < PAGE_BYTES
        for first, last in _bands(rows, stride_bytes if whole_rows else row_bytes):
            count = last - first
            if contiguous:
                band = np.empty((count, cols), stored)
                self._fill(band, offset + first * row_bytes)
            elif whole_rows:  # the last row ends where its segment ends: the file may end there
                flat = np.empty((count - 1) * stride_bytes + row_bytes, np.uint8)
                self._fill(flat, offset + first * stride_bytes)
                strides = (stride_bytes, stored.itemsize)
                band = np.ndarray((count, cols), stored, flat, strides=strides)
            else:
                band = np.empty((count, cols), stored)
                for row in range(count):
                    self._fill(band[row], offset + (first + row) * stride_bytes)
            out[first:last] = band

    def _fill(self, array: np.ndarray, offset: int) -> None:
        """Read the bytes of a contiguous array from `offset` on."""
        if array.size == 0:
            return
        assert self._descriptor is not None, "the file is closed"
        view = array.reshape(-1).view(np.uint8).data
        while len(view):
            try:
                count = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise os_failure("read", self.path, error) from error
            if not count:
                raise FileError(f"{self.path} became shorter while it was read")
            view, offset = view[count:], offset + count


class SafetensorsWriter:
    """Writes slices of tensors into a file that `create_file` made; several processes may do so at the same time.

    `sums`, where given, is told every piece that is written.
    """

    def __init__(self, path: str | Path, layout: Layout, sums: ChunkSums | None = None) -> None:
        self.path = Path(path)
        self.layout, self.sums = layout, sums
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY)
        except OSError as error:
            raise os_failure("write", self.path, error) from error

    def write(self, name: str, array: np.ndarray, dim: int = 0, start: int = 0) -> None:
        """Write `array` as rows start .. along `dim` of tensor `name`, rounded to the stored dtype.

        A value that the stored dtype can't hold (beyond 65504 in float16) is a FileError, not an infinity.
        """
        info = self.layout.tensors[name]
        _check_slice(info.shape, array.shape, dim, start)
        for offset, stride_bytes, matrix in _matrices(info, array, dim, start):
            self._write_matrix(name, FLOAT_DTYPES[info.dtype], offset, stride_bytes, matrix)

    def close(self) -> None:
        """Wait until what was written is on the disk, and give the file back."""
        try:
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)  # where a network file system may say that the disk is full
        except OSError as error:
            raise os_failure("write", self.path, error) from error

    def _write_matrix(self, name: str, stored: np.dtype, offset: int, stride_bytes: int, array: np.ndarray) -> None:
        rows, cols = array.shape
        row_bytes = cols * stored.itemsize
        for first, last in _bands(rows, row_bytes):
            band = self._rounded(name, array[first:last], stored)
            if row_bytes == stride_bytes:
                self._put(band, offset + first * row_bytes)
            else:
                self._put_rows(band, offset + first * stride_bytes, stride_bytes)

    def _rounded(self, name: str, array: np.ndarray, stored: np.dtype) -> np.ndarray:
        try:
            with np.errstate(over="raise", invalid="ignore", under="ignore"):
                return np.ascontiguousarray(array, dtype=stored)
        except FloatingPointError as error:
            raise FileError(
                f"{self.path}: a value of {name} is beyond what {stored} holds; save as bfloat16"
            ) from error

    def _put(self, array: np.ndarray, offset: int) -> None:
        if array.size == 0:
            return
        view = array.reshape(-1).view(np.uint8).data
        if self.sums is not None:
            self.sums.add(offset, view)
        self._write_all(view, offset)

    def _put_rows(self, rows: np.ndarray, offset: int, stride_bytes: int) -> None:
        """Rows of a contiguous array to places `stride_bytes` apart: columns of a tensor, many and short."""
        if rows.size == 0:
            return
        view, row_bytes = rows.reshape(-1).view(np.uint8).data, rows[0].nbytes
        if self.sums is not None:
            self.sums.add_rows(offset, stride_bytes, view, row_bytes)
        try:
            for start in range(0, len(view), row_bytes):
                row = view[start : start + row_bytes]
                count = os.pwrite(self._descriptor, row, offset)
                if count < row_bytes:
                    self._write_all(row[count:], offset + count)
                offset += stride_bytes
        except OSError as error:
            raise os_failure("write", self.path, error) from error

    def _write_all(self, view: memoryview, offset: int) -> None:
        while len(view):
            try:
                count = os.pwrite(self._descriptor, view, offset)
            except OSError as error:
                raise os_failure("write", self.path, error) from error
            view, offset = view[count:], offset + count


def plan_file(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """The layout of a file that holds {name: (stored dtype such as "BF16", shape)}, in the order of their names."""
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
    return Layout(len(text).to_bytes(8, "little") + text, infos, data_start + begin)


def create_file(path: str | Path, layout: Layout) -> None:
    """Make the file at its full size, header written, tensors still zero."""
    try:
        with open(path, "xb") as file:
            file.write(layout.header)
            file.truncate(layout.size)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise os_failure("create", path, error) from error


def read_header_bytes(path: Path) -> bytes:
    """All bytes before the tensors."""
    try:
        with open(path, "rb") as file:
            length = file.read(8)
            return length + file.read(int.from_bytes(length, "little"))
    except OSError as error:
        raise os_failure("read", path, error) from error


def _read_header(path: Path, descriptor: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
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
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise FileError(f"{path}: shape and data_offsets of tensor {name} must be lists of whole numbers, not below 0")
    needed = math.prod(shape) * ELEMENT_BYTES[dtype]
    if offsets[1] - offsets[0] != needed:
        raise FileError(
            f"{path}: tensor {name} ({dtype} {list(shape)}) needs {needed} bytes, its data_offsets {offsets} span "
            f"{offsets[1] - offsets[0]}"
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def _without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"{path}: the safetensors header names {twice} twice")
    return result


def _check_slice(stored: tuple[int, ...], wanted: tuple[int, ...], dim: int, start: int) -> None:
    """Programmer's errors only: shapes are checked against the model long before."""
    assert len(stored) == len(wanted), f"tensor of shape {stored}, array of shape {wanted}"
    for i, (have, want) in enumerate(zip(stored, wanted, strict=True)):
        inside = 0 <= start <= start + want <= have if i == dim else have == want
        assert inside, f"rows from {start} along dim {dim} of {stored} as {wanted}"


def _matrices(info: TensorInfo, array: np.ndarray, dim: int, start: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Cut a slice of a tensor into matrices: (byte offset of the first element, bytes from row to row, 2-D view)."""
    if array.size == 0:
        return
    yield from _cut(info.shape, ELEMENT_BYTES[info.dtype], info.offset, array, dim, start)


def _cut(
    shape: tuple[int, ...], itemsize: int, offset: int, array: np.ndarray, dim: int, start: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    if array.ndim < 2:
        yield offset + start * itemsize, array.size * itemsize, array.reshape(1, -1) if array.ndim == 0 else array[None]
        return
    stride = math.prod(shape[1:]) * itemsize
    if array.ndim == 2:
        yield offset + (start * stride if dim == 0 else start * itemsize), stride, array
        return
    first, inner = (start, (0, 0)) if dim == 0 else (0, (dim - 1, start))
    for row in range(array.shape[0]):
        yield from _cut(shape[1:], itemsize, offset + (first + row) * stride, array[row], *inner)


def _bands(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, BAND_BYTES // max(row_bytes, 1))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))
