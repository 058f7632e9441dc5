r"""Whose rows the keys of cross attention are: all rows of each source, also where sources are cut over ranks (cp).

| object         | where a source's rows lie | forward                      | backward                     |
|----------------|---------------------------|------------------------------|------------------------------|
| `OwnSources`   | on this rank              | k and v as they are          | dk and dv as they are        |
| `WholeSources` | cut over cp (`Rows.cut`)  | all-gather of k, v along cp  | reduce-scatter of dk and dv  |

Cross attention sees everything, so each query here needs every key of its source. Queries stay where they are; a rank
has k and v of its own heads for all rows of the sources, whose order the gathered rows are brought into. Rank c gets
back the sum, over the queries of all ranks, of the gradients of its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.backend.precision import widened
from mpitp.comm.group import Group
from mpitp.layers.array_type import REPLICATE, VARYING, ArrayType
from mpitp.layers.heads_keys import Order
from mpitp.layers.keys import check_cut
from mpitp.layers.layer import BACKWARD, FORWARD, Send
from mpitp.layers.rows import Rows


class SourceRows(ABC):
    """Brings the rows of k and v of whole sources together, forward, and their gradients apart, backward."""

    @abstractmethod
    def forward(self, kv: Array, rows: Rows) -> tuple[Array, Any]:
        """kv of the rows here [t_source, n] to kv of whole sources; `rows`: the encoder's. Also what backward needs."""

    @abstractmethod
    def backward(self, dkv: Array, ctx: Any, like: Array) -> Array:
        """dkv of whole sources to dkv of the rows here, of the dtype of `like`."""

    @abstractmethod
    def placements(self, incoming: ArrayType) -> ArrayType:
        """The type of k and v, as the heads take them."""

    def sends(self, width: int) -> tuple[Send, ...]:
        """What is sent for `width` columns of each row of whole sources."""
        return ()


class OwnSources(SourceRows):
    """Sources lie whole on this rank."""

    def forward(self, kv: Array, rows: Rows) -> tuple[Array, None]:
        return kv, None

    def backward(self, dkv: Array, ctx: None, like: Array) -> Array:
        return dkv

    def placements(self, incoming: ArrayType) -> ArrayType:
        if incoming.along("cp") == VARYING:
            incoming.expect("cp", "IR", "k and v", "the sources' rows on other ranks along cp aren't seen: gather them")
        return incoming


class WholeSources(SourceRows):
    """Sources are cut over `group`."""

    axis = "cp"

    def __init__(self, group: Group) -> None:
        self.group = group

    def forward(self, kv: Array, rows: Rows) -> tuple[Array, Order]:
        check_cut(rows, self.group.size)
        order = Order.of(rows, kv)
        return self.group.all_gather(kv)[order.to_sequences], order

    def backward(self, dkv: Array, ctx: Order, like: Array) -> Array:
        own = self.group.reduce_scatter(widened(dkv)[ctx.to_ranks], ctx.counts)
        return own.astype(like.dtype, copy=False)

    def placements(self, incoming: ArrayType) -> ArrayType:
        incoming.expect(self.axis, VARYING, "k and v", "rows are gathered from ranks that have other ones")
        return incoming.changed(self.axis, REPLICATE, incoming.columns)

    def sends(self, width: int) -> tuple[Send, ...]:
        """All ranks together hand in each row once; backward each rank hands in all."""
        forward = Send(FORWARD, "all_gather", width, "t n s / p", self.axis, summands=1)
        return forward, Send(BACKWARD, "reduce_scatter", width, "t n w", self.axis, is_wide=True)


OWN_SOURCES = OwnSources()
