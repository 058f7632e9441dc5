"""Arrays of an .npz file, which is a zip archive of .npy files."""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Iterable
from typing import IO
from zipfile import BadZipFile

import numpy as np

# what NumPy and zipfile raise at bytes that are no archive, or were cut short or changed
DAMAGE = (
    ValueError,
    KeyError,
    EOFError,
    BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,  # a way to compress that zipfile doesn't know
    RuntimeError,  # an archive with a password
    OverflowError,
    MemoryError,  # a shape that the file has no bytes for
    SyntaxError,
    TypeError,
)


def read_npz(file: IO[bytes], names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays by name; `names`: these alone. Raises OSError, and ValueError for damage or a name that is missing."""
    try:
        arrays = np.load(file, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise ValueError("it is a single array (.npy)")
        with arrays:
            found = {name: arrays[name] for name in (arrays.files if names is None else names)}
    except DAMAGE as error:
        raise ValueError(str(error.args[0]) if error.args else "it is damaged") from error
    if not all(isinstance(array, np.ndarray) for array in found.values()):
        raise ValueError("not everything in it is an array")
    return found
