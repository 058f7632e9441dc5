"""One pass of rows through a model: what its layers share beside the activation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpitp.backend.arrays import Array
from mpitp.backend.rng import stream_key
from mpitp.layers.rows import Rows

if TYPE_CHECKING:
    from mpitp.layers.balance import Balance
    from mpitp.layers.cached_attention import Caches
    from mpitp.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class DropoutState:
    """With the rows' samples and positions this decides the dropout masks of optimizer step `step`.

    Backward draws the same masks again. They don't depend on how the batch is cut into microbatches or dealt to ranks.
    """

    seed: int
    step: int

    def key(self, name: str) -> tuple[int, int]:
        """The generator's key for the dropout called `name`."""
        return stream_key(self.seed, f"dropout/{name}/step {self.step}")


@dataclass(slots=True, eq=False)
class Crossing:
    """What a pass of an encoder-decoder has beside the decoder's own rows (`crossing.py`).

    `source`: the encoder's pass; a run of the decoder's reads the source of the same sample. `ids`: what the decoder's
    embedding takes. `memory`: the encoder's output [t_source, h], `grad` its gradient, to which every block's cross
    attention adds. `kept`: in generation, the keys and values that each layer has made of the memory.
    """

    source: Pass
    ids: Array
    memory: Array | None = None
    grad: Array | None = None
    kept: dict[Any, Array] | None = None

    def add(self, grad: Array) -> None:
        """To the gradient of the memory. The array is given away."""
        if self.grad is None:
            self.grad = grad
        else:
            self.grad += grad

    def taken_grad(self) -> Array:
        """The whole gradient, once; a backward after another forward begins anew."""
        grad, self.grad = self.grad, None
        assert grad is not None, "a decoder whose blocks read nothing of the encoder's"
        return grad


@dataclass(slots=True, eq=False)
class Pass:
    """What the rows are, what is dropped (None: nothing, as in evaluation), and the caches of a generating pass.

    `shard`: those of the rows that this rank has between the cut products (norms, dropout, residual connections);
    None: all of them. Attention and the loss always have all `rows`.
    """

    rows: Rows
    dropout: DropoutState | None = None
    caches: Caches | None = None
    shard: Rows | None = None
    balance: Balance | None = None  # the auxiliary losses of its routers, where the pass ends in a loss that has some
    types: Array | None = None  # of shard_rows, where a model has several (BERT's two sentences); None: all 0
    crossing: Crossing | None = None  # of an encoder-decoder
    _tables: dict[Rotary, tuple[Array, Array]] = field(default_factory=dict)

    @property
    def shard_rows(self) -> Rows:
        """The rows between the cut products."""
        return self.rows if self.shard is None else self.shard

    def rotation(self, rotary: Rotary, like: Array) -> tuple[Array, Array]:
        """cos and sin of the rows' positions, made once a pass and not once a layer."""
        if rotary not in self._tables:
            self._tables[rotary] = rotary.table(self.rows, like)
        return self._tables[rotary]
