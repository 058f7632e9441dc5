"""What MPI is told about an array: the type of its elements, and at most so many of them in one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.reductions import stretches
from mpitp.errors import UsageError


class MpiTypes:
    """The types of the library `mpi` (mpi4py's module). `chunk_elements`: the most in one call."""

    def __init__(self, mpi: Any, chunk_elements: int) -> None:
        self._chunk = chunk_elements
        self._units = {1: mpi.BYTE, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T}
        self._reduced = {  # 16-bit floats are not among them: see `wide_dtype`
            np.dtype(np.float32): mpi.FLOAT,
            np.dtype(np.float64): mpi.DOUBLE,
            np.dtype(np.int8): mpi.INT8_T,
            np.dtype(np.int16): mpi.INT16_T,
            np.dtype(np.int32): mpi.INT32_T,
            np.dtype(np.int64): mpi.INT64_T,
            np.dtype(np.uint8): mpi.UINT8_T,
            np.dtype(np.uint16): mpi.UINT16_T,
            np.dtype(np.uint32): mpi.UINT32_T,
            np.dtype(np.uint64): mpi.UINT64_T,
        }

    def reduced(self, dtype: np.dtype) -> Any:
        """The type of elements that are to be reduced."""
        if dtype not in self._reduced:
            raise UsageError(f"arrays of {dtype} can't be reduced over ranks; floats and integers can")
        return self._reduced[dtype]

    def raw(self, flat: Array) -> list[Any]:
        """A flat buffer as unsigned integers of its item size, with their type: moves every dtype alike."""
        unit = next(size for size in (8, 4, 2, 1) if flat.dtype.itemsize % size == 0)
        return [flat.view(f"u{unit}"), self._units[unit]]

    def chunks(self, buffer: Array) -> list[list[Any]]:
        """A buffer, raw, in pieces for one call each."""
        flat = buffer.reshape(-1)
        return [self.raw(flat[part]) for part in stretches(flat.size, self._chunk)]
