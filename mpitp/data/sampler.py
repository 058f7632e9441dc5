"""Which tokens each sample of a run holds: a pure function of seed and sample number, the same in every layout.

A file is cut into windows of seq_len + 1 tokens that begin seq_len apart (the last token of one is the first of the
next: it is a target here and an input there). An epoch visits every window once, in an order drawn from the seed and
the epoch's number. What remains at the end, shorter than a window, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpitp.backend.rng import permute_index, stream_key
from mpitp.data.token_file import TokenFile
from mpitp.errors import ConfigError


def windows_of(samples: Sequence[int], num_windows: int, seed: int | None) -> np.ndarray:
    """The windows, int64, that the samples with these numbers show; seed None: in file order."""
    epochs, windows = np.divmod(np.asarray(samples, dtype=np.int64), num_windows)
    if seed is not None:
        for epoch in np.unique(epochs):
            key = stream_key(seed, f"data/epoch/{epoch}")
            windows[epochs == epoch] = permute_index(windows[epochs == epoch], num_windows, key)
    return windows


class Sampler:
    """Samples of a token file, numbered from 0 without end. Step n of a run takes global_batch_size * n and on."""

    def __init__(self, tokens: TokenFile, seq_len: int, seed: int | None) -> None:
        if len(tokens) < seq_len + 1:
            raise ConfigError(
                f"data.seq_len={seq_len} needs at least {seq_len + 1} tokens, but {tokens.directory} has "
                f"{len(tokens)}; lower it or prepare more text"
            )
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.num_windows = (len(tokens) - 1) // seq_len

    def batch(self, samples: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the samples with these numbers: two int64 arrays [len(samples), seq_len]."""
        starts = windows_of(samples, self.num_windows, self.seed) * self.seq_len
        windows = np.stack([self.tokens.read(int(start), self.seq_len + 1) for start in starts])
        return windows[:, :-1], windows[:, 1:]
