"""Attention of generation: keys and values of the tokens before come from caches, and what is new is stored there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.kv_cache import LayerCache
from mpitp.layers.passes import Pass
from mpitp.ops.attention import attention_forward
from mpitp.ops.newest_attention import attend_newest

if TYPE_CHECKING:
    from mpitp.layers.attention import AttentionHeads


class Caches(ABC):
    """Where a generating pass finds keys and values of the tokens before its own, and leaves those of its own."""

    @abstractmethod
    def attend(self, layer: AttentionHeads, run: Pass, qkv: tuple[Array, Array, Array], out: Array) -> list[Array]:
        """o [t, a/tp, d] of q, k and v [t, ..., d] goes to `out`; nothing is kept for a backward."""


class KeyCaches(Caches):
    """One cache for each layer of attention, made when it first attends; `capacities`: places of each slot."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = tuple(capacities)
        self._of_layer: dict[AttentionHeads, LayerCache] = {}

    def attend(self, layer: AttentionHeads, run: Pass, qkv: tuple[Array, Array, Array], out: Array) -> list[Array]:
        """o [t, a/tp, d] of q, k and v [t, ..., d] goes to `out`; nothing is kept for a backward."""
        q, k, v = qkv
        cache = self.of(layer, q)
        for each, rows in run.rows.places():
            if each.length == 1:
                row = rows.start
                stores = cache.stores(each.slot, each.first + 1)
                attend_newest((q[row], k[row], v[row]), stores, each.first, layer.query_groups, out[row])
            else:
                keys, values = cache.extend(each.slot, each.first, k[rows], v[rows])
                attention_forward(q[rows], keys, values, layer.head_map, sight=layer.sight, out=out[rows])
        return []

    def of(self, layer: AttentionHeads, like: Array) -> LayerCache:
        """The cache of a layer of attention."""
        if layer not in self._of_layer:
            kv_heads, xp = len(layer.heads.kv), array_module(like)
            self._of_layer[layer] = LayerCache(self.capacities, kv_heads, layer.head_dim, like.dtype, xp)
        return self._of_layer[layer]

    def keep(self, slots: list[int]) -> None:
        """Go on with these slots only, renumbered in this order; one that comes again is copied."""
        self.capacities = tuple(self.capacities[slot] for slot in slots)
        for cache in self._of_layer.values():
            cache.keep(slots)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(cache.nbytes for cache in self._of_layer.values())
