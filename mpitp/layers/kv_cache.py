"""Keys and values of the tokens already seen, one store a layer, for generation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mpitp.backend.arrays import Array

Stores = tuple[Array, Array]  # keys and values, [g, capacity, d] each


class LayerCache:
    """Keys and values of this rank's KV heads for every sequence of a batch.

    Stored as [b][g, capacity, d], so that one head's keys are contiguous; handed out as views [u, g, d].
    """

    def __init__(self, capacities: tuple[int, ...], kv_heads: int, head_dim: int, dtype: Any, xp: ModuleType) -> None:
        self._keys = [xp.zeros((kv_heads, capacity, head_dim), dtype) for capacity in capacities]
        self._values = [xp.zeros((kv_heads, capacity, head_dim), dtype) for capacity in capacities]

    def extend(self, index: int, past: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Store k, v [s, g, d] of sequence `index` from position `past` on; all its keys and values [past+s, g, d]."""
        return stored(self.stores(index, past + k.shape[0]), past, k, v)

    def stores(self, index: int, stop: int) -> Stores:
        """Where keys and values of sequence `index` are kept [g, capacity, d], with room up to position `stop`."""
        keys, values = self._keys[index], self._values[index]
        assert stop <= keys.shape[1], "the caller checks the capacity before it computes"
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in (*self._keys, *self._values))

    def keep(self, indices: list[int]) -> None:
        """Go on with these sequences only, renumbered in this order; one that comes again is copied."""
        again = [i in indices[:place] for place, i in enumerate(indices)]
        chosen = list(zip(indices, again, strict=True))
        self._keys = [self._keys[i].copy() if is_again else self._keys[i] for i, is_again in chosen]
        self._values = [self._values[i].copy() if is_again else self._values[i] for i, is_again in chosen]


def stored(stores: Stores, past: int, k: Array, v: Array) -> tuple[Array, Array]:
    """Lay k and v [s, g, d] into a sequence's stores from position `past` on; its keys and values [past+s, g, d]."""
    (keys, values), stop = stores, past + k.shape[0]
    keys[:, past:stop], values[:, past:stop] = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    return keys[:, :stop].transpose(1, 0, 2), values[:, :stop].transpose(1, 0, 2)
