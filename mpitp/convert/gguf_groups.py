r"""The 4-bit matrices of a GGUF file as groups of 32 with a scale and a least value each, unchanged: w = c s + m.

    Q4_0    a group: d (float16), codes                      s = d                   m = -8 d
    Q4_1    a group: d, m (float16), codes                   s = d                   m
    Q4_K    8 groups: d, e (float16), a_i, b_i (6 bits)      s_i = d a_i             m_i = -e b_i

s and m are float32, and exact: products of 11 and 6 bits. c s + m in float32, rounded in the sum alone, is what the
gguf package's floats are too, to the bit.
"""

from __future__ import annotations

import gguf
import numpy as np

from mpitp.convert.gguf_file import GgufFile
from mpitp.convert.gguf_model import TOP_TENSORS, architecture_of, halves_from_pairs, hf_names, is_rotated
from mpitp.ops.groupwise import GROUP_SIZE, packed

HALF = 2  # bytes of a float16
SUPER_GROUPS, SUPER_SCALES = 8, 12  # of a Q4_K's block: groups, and bytes of their 6-bit numbers
Groups = tuple[np.ndarray, np.ndarray]


class GgufGroups:
    """The groups of a file's matrices, by the names that these have in a Hugging Face directory."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        self.file, self.head_dim = file, head_dim
        self._names = {new: name for name, new in hf_names(file).items() if file.kind(name) in _READERS}

    def of(self, tensor: str) -> Groups | None:
        """Codes [n, k/2] and scales with least values [n, 2 k/32] of a matrix; None: the file has others."""
        name = self._names.get(tensor)
        if name is None:
            return None
        codes, scales = _READERS[self.file.kind(name)](self.file.stored(name))
        if is_rotated(name) and architecture_of(self.file).interleaved:
            return halves_from_pairs(codes, self.head_dim), halves_from_pairs(scales, self.head_dim)
        return codes, scales


def has_least_values(file: GgufFile) -> bool:
    """Whether a matrix (tables of the vocabulary are none) has groups with a least value of their own."""
    return any(file.kind(name) in ("Q4_1", "Q4_K") for name in hf_names(file) if name not in TOP_TENSORS)


def _q4_0(stored: np.ndarray) -> Groups:
    blocks = _blocks(stored, HALF + GROUP_SIZE // 2)
    scale = _halves(blocks, 0)
    return _joined(blocks[:, :, HALF:], scale, -8 * scale)


def _q4_1(stored: np.ndarray) -> Groups:
    blocks = _blocks(stored, 2 * HALF + GROUP_SIZE // 2)
    return _joined(blocks[:, :, 2 * HALF :], _halves(blocks, 0), _halves(blocks, HALF))


def _q4_k(stored: np.ndarray) -> Groups:
    """Byte j of the i-th 32 bytes holds c[j] of the groups 2 i (low half) and 2 i + 1 (high half)."""
    blocks = _blocks(stored, 2 * HALF + SUPER_SCALES + SUPER_GROUPS * GROUP_SIZE // 2)
    n, number, first = *blocks.shape[:2], 2 * HALF + SUPER_SCALES
    factors = gguf.quants.Q4_K.get_scale_min(blocks[:, :, 2 * HALF : first].reshape(n * number, -1))
    of_scale, of_least = (factor.reshape(n, number, SUPER_GROUPS).astype(np.float32) for factor in factors)
    pairs = blocks[:, :, first:].reshape(n, number * SUPER_GROUPS // 2, 1, GROUP_SIZE)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(n, -1, GROUP_SIZE)
    scale = _halves(blocks, 0)[..., None] * of_scale
    least = -(_halves(blocks, HALF)[..., None] * of_least)
    return _joined(packed(codes), scale, least)


_READERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def _blocks(stored: np.ndarray, length: int) -> np.ndarray:
    """Bytes [n, blocks, length] of rows."""
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(stored), -1, length)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a place of each block [n, blocks], as float32."""
    return np.ascontiguousarray(blocks[:, :, start : start + HALF]).view("<f2")[..., 0].astype(np.float32)


def _joined(codes: np.ndarray, scale: np.ndarray, least: np.ndarray) -> Groups:
    n = len(codes)
    return np.ascontiguousarray(codes).reshape(n, -1), np.stack([scale, least], axis=-1).reshape(n, -1)
