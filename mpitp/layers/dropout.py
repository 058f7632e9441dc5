"""Dropout whose mask is a function of global indices: equal on every rank, drawn again in backward, never stored.

Element (sample, position, column) of the activation is kept by a number drawn at exactly that index of the stream
(seed, name, step), see `backend/rng.py`. The layout, the microbatch and the rank count don't enter.
"""

from __future__ import annotations

from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.backend.rng import dropout_mask
from mpitp.layers.sequences import Sequences
from mpitp.ops.dropout import dropout_forward

Array = Any


class Dropout:
    """y = x * keep / (1 - rate) on a replicated activation [t, h] (Srivastava et al. 2014)."""

    def __init__(self, rate: float, name: str) -> None:
        self.rate, self.name = rate, name

    def forward(self, x: Array, seqs: Sequences) -> Array:
        """x [t, h] -> y [t, h]; x itself when nothing is dropped."""
        if not self.rate or seqs.dropout is None:
            return x
        return dropout_forward(x, self._mask(x, seqs))

    def backward(self, dy: Array, seqs: Sequences) -> Array:
        """dy [t, h] -> dx [t, h]: the same mask again."""
        return self.forward(dy, seqs)

    def _mask(self, x: Array, seqs: Sequences) -> Array:
        assert seqs.dropout is not None
        xp, key = array_module(x), seqs.dropout.key(self.name)
        mask = xp.empty(x.shape, x.dtype)
        for i, rows in seqs.rows():
            places = range(0, rows.stop - rows.start)
            sample = seqs.dropout.samples[i]
            mask[rows] = dropout_mask(self.rate, key, sample, places, range(x.shape[1]), x.dtype, xp)
        return mask
