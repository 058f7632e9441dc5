"""Parameters that are the file's own bytes: nothing is read, nothing is copied, and ranks of a node share the pages.

    one rank     most of a model: whole matrices, and gate and up, which are neighbours in files as in memory
    several      tables of rows (the vocabulary's), and whatever each rank has whole

Where the file has other numbers than are wanted (bfloat16), columns of a matrix, or parts of a fused one in other
places (q, k and v), there is no way round a copy. Such a model is for reading: what is written to its parameters makes
copies of the pages, and a file that is cut short meanwhile ends the process. So it is for short lives, where reading
all weights takes longer than the first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.checkpoint.hf_directory import HfWeights
from mpitp.checkpoint.safetensors_file import Span
from mpitp.layers.param import Param

Box = tuple[str, Array, Sequence[int]]  # a tensor, what a box of it is read into, where the box begins

SMALLEST_BYTES = 1 << 16  # smaller ones are read: mapping takes as long


def put_in_place(weights: HfWeights, param: Param, boxes: Sequence[Box]) -> bool:
    """Let `param` be bytes of a file, where those of all its boxes lie there as in its array; whether they do."""
    data = param.data
    if not isinstance(data, np.ndarray) or data.nbytes < SMALLEST_BYTES:
        return False
    spans: list[Span] = []
    filled = data.ctypes.data  # up to here, by the boxes so far
    for tensor, box, starts in boxes:
        span = weights.span(tensor, box, starts) if box.flags.c_contiguous and box.ctypes.data == filled else None
        if span is None or (spans and (span.file is not spans[-1].file or span.start != spans[-1].stop)):
            return False
        spans.append(span)
        filled += box.nbytes
    if not spans or filled != data.ctypes.data + data.nbytes:
        return False
    param.data = spans[0].file.in_place(spans[0].start, data.shape, data.dtype)
    return True
