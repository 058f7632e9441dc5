"""Whose keys the queries of a pass meet: what stands between a rank's heads and the arithmetic of attention.

| object      | file                  | the queries of a rank see                            | communicates    |
|-------------|-----------------------|------------------------------------------------------|-----------------|
| `OwnKeys`   | here                  | the keys of the same run, all of which are here      | nothing         |
| `RingKeys`  | `ring_keys.py`        | their own keys, and those that come round along cp   | sends, receives |
| `HeadsKeys` | `heads_keys.py`       | all keys, for some heads: rows exchanged for heads   | all-to-all      |
| `KeyCaches` | `cached_attention.py` | what earlier passes have left (generation)           | nothing         |

Like a pair, such an object has a forward and its conjugate, and only `build.py` chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitp.backend.arrays import Array
from mpitp.errors import ConfigError
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.layer import Send
from mpitp.layers.passes import Pass
from mpitp.layers.rows import Rows
from mpitp.ops.attention import Kept, attention_backward, attention_forward

if TYPE_CHECKING:
    from mpitp.layers.attention import AttentionHeads

Heads = tuple[Array, Array, Array]  # q [t, a/tp, d], k and v [t, g/tp, d], or their gradients


@dataclass(frozen=True, slots=True)
class Attended:
    """What the forward of a pass was given and made: q, k, v and o [t, ..., d], and what it wants back."""

    q: Array
    k: Array
    v: Array
    o: Array
    more: Any


class Keys(ABC):
    """Attention of one pass over some keys, forward and backward."""

    @abstractmethod
    def attend(self, layer: AttentionHeads, run: Pass, qkv: Heads, out: Array) -> Any:
        """o [t, a/tp, d] of q, k and v goes to `out`; returns what backward wants back (lse, and more)."""

    @abstractmethod
    def backward(self, layer: AttentionHeads, run: Pass, do: Array, kept: Attended, grads: Heads) -> None:
        """dq, and dk and dv by slots (see `KvReplicas`) of do [t, a/tp, d] go to `grads`."""

    @abstractmethod
    def check(self, incoming: ArrayType) -> None:
        """Raise PlacementError where q, k and v of this type are not what it can take."""

    def sends(self, layer: AttentionHeads) -> tuple[Send, ...]:
        """What it communicates in a pass."""
        return ()


def check_cut(rows: Rows, ranks: int) -> None:
    """Raise ConfigError for sequences that aren't cut over as many ranks."""
    if len(rows.everyone) != ranks:
        raise ConfigError(
            f"attention over {ranks} context-parallel ranks needs sequences that are cut over them, and these are cut "
            f"over {len(rows.everyone) or 1}; make the batch with batch.cut(mesh['cp'].rank, {ranks})"
        )


class OwnKeys(Keys):
    """The rows of a run see keys and values of the same run."""

    def attend(self, layer: AttentionHeads, run: Pass, qkv: Heads, out: Array) -> list[Array]:
        lse = []
        for each, rows in run.rows.places():
            q, k, v = (x[rows] for x in qkv)
            mask = layer.dropout.masks(run, each, layer.heads, out)
            made = attention_forward(q, k, v, layer.head_map, sight=layer.sight, dropout=mask, out=out[rows])
            lse.append(made[1])
        return lse

    def backward(self, layer: AttentionHeads, run: Pass, do: Array, kept: Attended, grads: Heads) -> None:
        for i, (each, rows) in enumerate(run.rows.places()):
            mask = layer.dropout.masks(run, each, layer.heads, do)
            of_run = Kept(kept.q[rows], kept.k[rows], kept.v[rows], kept.o[rows], kept.more[i])
            dq, dk, dv = (grad[rows] for grad in grads)
            attention_backward(do[rows], of_run, layer.head_map, sight=layer.sight, dropout=mask, out=(dq, dk, dv))

    def check(self, incoming: ArrayType) -> None:
        if incoming.along("cp") == VARYING:
            incoming.expect("cp", "IR", "q, k and v", "the keys of other ranks along cp aren't seen: exchange them")


OWN_KEYS = OwnKeys()
