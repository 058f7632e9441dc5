"""The tensors of a safetensors file: slices read and written without touching other bytes (`safetensors_header.py` has
the format).

Bytes are read and written at their positions (pread, pwrite), not through a memory map: what a rank doesn't need never
counts as its memory, and a file cut short while it is open is an error, not a crash. Only whoever asks for `in_place`
gets the file's own pages, which take no time to read.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import ml_dtypes
import numpy as np

from mpitp.checkpoint.chunk_sums import ChunkSums
from mpitp.checkpoint.safetensors_header import ELEMENT_BYTES, FilePlan, TensorInfo, read_header
from mpitp.errors import FileError
from mpitp.files import check_regular, os_failure

BAND_BYTES = 4 << 20  # scratch memory of a read or a write
PAGE_BYTES = 4096
FLOAT_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODE_DTYPES = {"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)}  # of weights in 8 or 4 bits; never converted
STORED_DTYPES = FLOAT_DTYPES | CODE_DTYPES
POPULATE_READ = 22  # madvise's MADV_POPULATE_READ (Linux 5.14): one call in place of a page fault for every few pages
STORED_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring bytes of a file that hold a box of a tensor as it is wanted."""

    file: SafetensorsFile
    start: int
    stop: int


class SafetensorsFile:
    """An open safetensors file. Making one reads and checks the header only."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._mapping: mmap.mmap | None = None
        try:
            check_regular(self.path)
            self._descriptor = os.open(self.path, os.O_RDONLY)
            self.tensors, self.metadata = read_header(self.path, self._descriptor)
        except OSError as error:
            self.close()
            raise os_failure("read", self.path, error) from error
        except FileError:
            self.close()
            raise

    def read(self, name: str, out: np.ndarray, starts: Sequence[int] = ()) -> None:
        """Fill `out` with the box of tensor `name` that begins at `starts`, one a dim (none: 0), in out's dtype.

        `out` (float32 or float64; int8 or uint8 for codes, as stored) may have any strides: pass `x.T` to read into the
        transpose of x.
        """
        info = self.tensors[name]
        readable = [code for code, dtype in CODE_DTYPES.items() if dtype == out.dtype] or list(FLOAT_DTYPES)
        if info.dtype not in readable:
            known = ", ".join(readable)
            raise FileError(
                f"{self.path}: tensor {name} is stored as {info.dtype}; only {known} can be read as weights"
            )
        for offset, stride_bytes, matrix in _matrices(info, out, starts):
            self._read_matrix(STORED_DTYPES[info.dtype], offset, stride_bytes, matrix)

    def span(self, name: str, like: np.ndarray, starts: Sequence[int] = ()) -> Span | None:
        """Where the file has the box that `read` would fill `like` with, as `like` has it: in its dtype, without gaps.
        None: nowhere.
        """
        info = self.tensors[name]
        if STORED_DTYPES.get(info.dtype) != like.dtype or not like.size or info.offset % like.itemsize:
            return None
        matrices = list(_matrices(info, like, starts))
        for (offset, stride, matrix), (following, _, _) in zip(matrices, [*matrices[1:], (None, 0, None)], strict=True):
            rows, row_bytes = len(matrix), matrix.shape[1] * like.itemsize
            if (rows > 1 and stride != row_bytes) or following not in (None, offset + rows * row_bytes):
                return None
        return Span(self, matrices[0][0], matrices[0][0] + like.nbytes)

    def in_place(self, start: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array that is the file's own bytes from `start` on. It stays when the file is closed; what is written to
        it stays in this process. Whoever cuts the file short meanwhile ends the process by a bus error.
        """
        stop, page = start + math.prod(shape) * dtype.itemsize, start - start % mmap.PAGESIZE
        if self._mapping is None:
            assert self._descriptor is not None, "the file is closed"
            try:
                self._mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise os_failure("map", self.path, error) from error
        with contextlib.suppress(OSError):  # an older kernel finds its pages one by one
            self._mapping.madvise(POPULATE_READ, page, stop - page)
        return np.frombuffer(self._mapping, np.uint8, stop - start, start).view(dtype).reshape(shape)

    def close(self) -> None:
        """Give the file back; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._mapping = None

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

    def __init__(self, path: str | Path, plan: FilePlan, sums: ChunkSums | None = None) -> None:
        self.path = Path(path)
        self.plan, self.sums = plan, sums
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY)
        except OSError as error:
            raise os_failure("write", self.path, error) from error

    def write(self, name: str, array: np.ndarray, starts: Sequence[int] = ()) -> None:
        """Write `array` as the box of tensor `name` that begins at `starts`, one a dim (none: 0), in the stored dtype.

        A value that the stored dtype can't hold (beyond 65504 in float16) is a FileError, not an infinity.
        """
        info = self.plan.tensors[name]
        for offset, stride_bytes, matrix in _matrices(info, array, starts):
            self._write_matrix(name, STORED_DTYPES[info.dtype], offset, stride_bytes, matrix)

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


def create_file(path: str | Path, plan: FilePlan) -> None:
    """Make the file at its full size, header written, tensors still zero."""
    try:
        with open(path, "xb") as file:
            file.write(plan.header)
            file.truncate(plan.size)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise os_failure("create", path, error) from error


def _matrices(info: TensorInfo, array: np.ndarray, starts: Sequence[int]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Cut a box of a tensor into matrices: (byte offset of the first element, bytes from row to row, 2-D view)."""
    starts = tuple(starts) or (0,) * len(info.shape)
    inside = [start + want <= have for start, want, have in zip(starts, array.shape, info.shape, strict=True)]
    assert all(inside), f"an array of shape {array.shape} from {starts} on in a tensor of {info.shape}"
    if array.size:
        yield from _cut(info.shape, ELEMENT_BYTES[info.dtype], info.offset, array, starts)


def _cut(
    shape: tuple[int, ...], itemsize: int, offset: int, array: np.ndarray, starts: tuple[int, ...]
) -> Iterator[tuple[int, int, np.ndarray]]:
    if array.ndim < 2:
        first = starts[0] if starts else 0
        yield offset + first * itemsize, array.size * itemsize, array.reshape(1, -1) if array.ndim == 0 else array[None]
        return
    stride = math.prod(shape[1:]) * itemsize
    if array.ndim == 2:
        yield offset + starts[0] * stride + starts[1] * itemsize, stride, array
        return
    for row in range(array.shape[0]):
        yield from _cut(shape[1:], itemsize, offset + (starts[0] + row) * stride, array[row], starts[1:])


def _bands(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, BAND_BYTES // max(row_bytes, 1))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))
