"""A GGUF file, opened with the `gguf` package and checked: its metadata, and its tensors as float32 rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mpitp.errors import FileError
from mpitp.files import check_regular, os_failure

MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs"


class GgufFile:
    """An open GGUF file. Tensors are mapped from the file and dequantised some rows at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check_magic(self.path)
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata: Mapping[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # the package checks little: damage shows as any kind of error
            raise FileError(f"{path} is a truncated or damaged GGUF file (its reader says: {error})") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata value under `key`, of type `kind`; without a default it must be there."""
        value = self.metadata.get(key, default)
        if value is None:
            raise FileError(f"{self.path}: the GGUF key {key} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise FileError(f"{self.path}: the GGUF key {key} must be a {kind.__name__}, got {value!r:.60}")
        return value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape (outermost dim first, as in NumPy) of every tensor."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def kind(self, name: str) -> str:
        """How a tensor is stored: "F32", "Q4_K" and so on."""
        return str(self._tensors[name].tensor_type.name)

    def stored(self, name: str) -> np.ndarray:
        """A quantised tensor's rows as the file has them, uint8 [n, bytes]."""
        return np.asarray(self._tensors[name].data)

    def rows(self, name: str, band: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, float32 rows) of a tensor in bands of at most `band` rows; a vector is one band."""
        tensor = self._tensors[name]
        stored = tensor.data
        if stored.ndim < 2:
            yield 0, self._floats(name, stored)
            return
        for first in range(0, stored.shape[0], band):
            yield first, self._floats(name, stored[first : first + band])

    def _floats(self, name: str, stored: np.ndarray) -> np.ndarray:
        kind = self._tensors[name].tensor_type
        try:
            return np.asarray(gguf.quants.dequantize(stored, kind), np.float32)
        except NotImplementedError as error:
            raise FileError(f"{self.path}: tensor {name} is quantised as {kind.name}, which can't be read") from error


def _check_magic(path: Path) -> None:
    try:
        check_regular(path)
        with open(path, "rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise os_failure("read", path, error) from error
    if start == LFS_POINTER:
        raise FileError(f"{path} is a git-lfs pointer, not the file itself: fetch it with `git lfs pull`")
    if not start.startswith(MAGIC):
        raise FileError(f"{path} is no GGUF file: it must begin with {MAGIC!r}, but begins with {start[:4]!r}")
