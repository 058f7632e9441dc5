"""What every kind of model is: named layers that run one after the other, and a loss over what the last one makes.

    x_0 = inputs(batch),  x_i = layer_i(x_{i-1}),  loss = sum over counted targets of -log softmax(x_n)[target]

A kind of model says what goes in and what it refuses (`CausalLM`, `Encoder`); all the rest follows from the layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitp.backend.arrays import Array, from_host, to_host
from mpitp.backend.precision import wide_dtype
from mpitp.errors import ConfigError
from mpitp.layers.balance import Balance, BalanceRule
from mpitp.layers.cached_attention import Caches
from mpitp.layers.layer import Layer, TypedLayer, given_by, typed_layers, unwrapped
from mpitp.layers.loss import CrossEntropyContext, VocabParallelCrossEntropy
from mpitp.layers.mappings import GatherFromTP
from mpitp.layers.param import Param
from mpitp.layers.passes import Pass
from mpitp.layers.rows import Rows
from mpitp.layers.site import Site
from mpitp.models.batch import Batch
from mpitp.models.beside import Alone, Beside
from mpitp.models.names import HfPiece
from mpitp.models.stages import Chunk

if TYPE_CHECKING:
    from mpitp.models.any_config import AnyConfig


@dataclass(slots=True)
class LossContext:
    """The contexts of a forward pass that ended in a loss."""

    model: list[Any]
    loss: ObjectiveContext


@dataclass(slots=True)
class ObjectiveContext:
    """Of a loss as it is trained: the cross entropy's, and the auxiliary losses that go with it (None: there are none),
    which weigh as much as so many `targets`.
    """

    cross_entropy: CrossEntropyContext
    balance: Balance | None = None
    targets: int = 0


@dataclass(frozen=True, slots=True)
class HfNames:
    """Where the parts of all parameters lie in Hugging Face files, and which tensors there aren't needed.

    `tied`: parameters that are another one, and bear its name: {"head.weight": "embedding.weight"}.
    """

    pieces: dict[tuple[str, str], HfPiece]
    ignorable_tensors: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)


def is_within(name: str, layers: Collection[str]) -> bool:
    """Whether a parameter of this name is of one of the layers."""
    return any(name.startswith(f"{layer}.") for layer in layers)


def _ignore(name: str) -> None:
    """Nobody wants to know."""


def _forward_all(layers: Iterable[Layer], x: Array, run: Pass) -> tuple[Array, list[Any]]:
    ctxs = []
    for layer in layers:
        x, ctx = given_by(layer, layer.forward(x, run))
        ctxs.append(ctx)
    return x, ctxs


class LayeredModel(ABC):
    """A model on a site; `layers` by name, in forward order.

    On a mesh with stages (`stages.py`) a rank's model has the layers of its stage alone. It runs by `chunks` then, and
    only the one that ends in the loss has a loss.
    """

    config: AnyConfig
    entrance = "embedding"  # the layer that takes the inputs

    def __init__(
        self,
        site: Site,
        layers: dict[str, Layer],
        loss: VocabParallelCrossEntropy,
        names: HfNames,
        chunks: Sequence[Chunk] = (),
    ) -> None:
        self.site, self.layers, self.loss = site, layers, loss
        self.chunks = chunks or (Chunk(tuple(layers), site.batch_type),)
        self.pieces, self.ignorable_tensors, self.tied = names.pieces, names.ignorable_tensors, names.tied
        self.gather = GatherFromTP(site.tp)
        self.balance_rule: BalanceRule | None = None  # of its auxiliary losses
        self.beside: Beside = Alone(self)  # what goes between stages
        self.stage_layers: Sequence[Collection[str]] = ()  # names of every stage's layers, where there are several

    @abstractmethod
    def inputs(self, batch: Batch) -> Array:
        """What the first layer takes. Raises ConfigError for a batch that doesn't fit the model."""

    @abstractmethod
    def check_targets(self, targets: np.ndarray) -> None:
        """Raise ConfigError for a target that the loss doesn't know."""

    @property
    def device(self) -> Any:
        """Where its arrays live."""
        return self.site.device

    @property
    def dtype(self) -> np.dtype:
        """Of its weights and activations."""
        return self.site.dtype

    def __getitem__(self, name: str) -> Any:
        """The layer called `name`: "head", "blocks.1.attention.qkv", "loss". Raises KeyError where there is none."""
        layers = self.all_layers()
        first = next((top for top in layers if name == top or name.startswith(top + ".")), name)
        layer: Any = layers[first]
        for inner in name[len(first) + 1 :].split(".") if name != first else []:
            layer = layer.children()[inner]
        return unwrapped(layer)

    @property
    def blocks(self) -> list[Any]:
        """The transformer blocks."""
        return [unwrapped(layer) for name, layer in self.layers.items() if name.startswith("blocks.")]

    def all_layers(self) -> dict[str, Layer]:
        """Its layers by name, the loss last."""
        return {name: layer for chunk in self.chunks for name, layer in self._with_loss(chunk).items()}

    def forward(self, batch: Batch) -> tuple[Array, list[Any]]:
        """What the last layer makes of a batch (logits, this rank's columns), and the contexts of all layers."""
        return self.run_layers(list(self.layers.values()), batch, self.new_pass(batch))

    def new_pass(self, batch: Batch, caches: Caches | None = None) -> Pass:
        """What the layers share in a pass over a batch."""
        rows, own = batch.rows, self.site.token_share(batch.rows.num_tokens)
        types = None if batch.types is None else from_host(batch.types[own.start : own.stop], self.device.xp)
        rule = self.balance_rule if batch.targets is not None else None
        return Pass(rows, batch.dropout, caches, self.shard_of(rows), None if rule is None else Balance(rule), types)

    def shard_of(self, rows: Rows) -> Rows | None:
        """Those of the rows that this rank has between the cut products; None: all of them."""
        return rows.part(self.site.token_share(rows.num_tokens)) if self.site.sequence_parallel else None

    def run_layers(self, layers: list[Layer], batch: Batch, run: Pass) -> tuple[Array, list[Any]]:
        """What comes out of these layers, the first of which takes the inputs, and their contexts."""
        return _forward_all(layers, self.inputs(batch), run)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Of what goes from one block to the next on this rank."""
        return len(self.site.token_share(batch.rows.num_tokens)), self.config.hidden_size

    def forward_chunk(self, chunk: Chunk, x: Array, run: Pass) -> tuple[Array, list[Any]]:
        """What comes out of a chunk's last layer for what goes into its first, and the contexts of all its layers."""
        return _forward_all([self.layers[name] for name in chunk.names], x, run)

    def backward_chunk(
        self, chunk: Chunk, dy: Array, ctxs: Sequence[Any], done: Callable[[str], None] = _ignore
    ) -> Array:
        """The gradient of what has gone into a chunk; None where that were ids. `done`: as of `backward`."""
        for name, ctx in zip(reversed(chunk.names), reversed(ctxs), strict=True):
            dy = self.layers[name].backward(dy, ctx)
            done(name)
        return dy

    def backward(self, dlogits: Array, ctx: list[Any], done: Callable[[str], None] = _ignore) -> None:
        """dlogits [t, v/tp]: add to the gradients of all parameters. `done`: told each layer as its backward ends."""
        dx = dlogits
        for (name, layer), layer_ctx in zip(reversed(self.layers.items()), reversed(ctx), strict=True):
            dx = layer.backward(dx, layer_ctx)
            done(name)

    def loss_forward(self, batch: Batch) -> tuple[float, LossContext]:
        """The summed loss of the batch's counted targets (divide by `batch.num_targets` for the mean): their cross
        entropy, and as many times the weighed auxiliary losses, where the model has such.
        """
        return self.scored(batch)[1:]

    def scored(self, batch: Batch) -> tuple[Array, float, LossContext]:
        """The same behind the logits, of this rank's columns."""
        self._targets(batch)
        run = self.new_pass(batch)
        logits, model_ctx = self.run_layers(list(self.layers.values()), batch, run)
        loss, loss_ctx = self.objective(logits, batch, run)
        return logits, loss, LossContext(model_ctx, loss_ctx)

    def loss_backward(self, ctx: LossContext, scale: float, done: Callable[[str], None] = _ignore) -> None:
        """Add `scale` times the gradient of the summed loss to the gradients of all parameters."""
        self.backward(self.dobjective(ctx.loss, scale), ctx.model, done)

    def objective(self, logits: Array, batch: Batch, run: Pass) -> tuple[float, ObjectiveContext]:
        """The summed loss of a pass whose routers have all counted."""
        loss, ctx = self.loss_of(logits, batch)
        if run.balance is not None:
            loss += batch.num_targets * run.balance.finish()
        return loss, ObjectiveContext(ctx, run.balance, batch.whole_targets)

    def dobjective(self, ctx: ObjectiveContext, scale: float) -> Array:
        """The gradient of the logits, `scale` times; routers are told what theirs weighs."""
        if ctx.balance is not None:
            ctx.balance.weight = scale * ctx.targets
        return self.dlogits(ctx.cross_entropy, scale)

    def loss_of(self, logits: Array, batch: Batch) -> tuple[float, CrossEntropyContext]:
        """The summed cross entropy of the batch's counted targets, of its logits [t, v/tp]."""
        return self._summed_loss(logits, self._targets(batch))

    def dlogits(self, ctx: CrossEntropyContext, scale: float) -> Array:
        """[t, v/tp]: `scale` times the gradient of the summed loss."""
        wide = wide_dtype(self.dtype)
        dlosses = (ctx.targets >= 0).astype(wide) * wide.type(scale)  # [t]
        return self.loss.backward(dlosses, ctx)

    def gather_logits(self, logits: Array) -> Array:
        """[t, v/tp] of every rank -> [t, v] on every rank."""
        return self.gather.forward(logits)

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """Every parameter once, in forward order; a tied one under its first name, wherever that layer is."""
        seen: set[int] = set()
        for layer_name, layer in self.layers.items():
            for inner, param in layer.params().items():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield self._first_name(f"{layer_name}.{inner}"), param

    def _first_name(self, name: str) -> str:
        """The name of the parameter that this one is tied to, where that isn't among this rank's own."""
        first = self.tied.get(name, name)
        return name if is_within(first, self.layers) else first

    def stages_with(self, first: str) -> list[int]:
        """The stages that hold the parameter called so, or one that is tied to it, from the last on."""
        names = [first, *(second for second, of in self.tied.items() if of == first)]
        holders = [i for i, own in enumerate(self.stage_layers) if any(is_within(name, own) for name in names)]
        return holders[::-1]

    def types(self) -> dict[str, TypedLayer]:
        """What every layer takes and gives along each axis. Raises PlacementError where they don't fit."""
        chunks = [typed_layers(self._with_loss(chunk), chunk.incoming) for chunk in self.chunks]
        return {name: typed for found in chunks for name, typed in found.items()}

    def hf_pieces(self) -> dict[tuple[str, str], HfPiece]:
        """Where each (parameter, part) lies in a Hugging Face directory."""
        return self.pieces

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for _, param in self.named_params():
            param.grad = None

    def _with_loss(self, chunk: Chunk) -> dict[str, Layer]:
        names = chunk.names if len(self.chunks) > 1 else self.layers  # layers of a user's own, put in later, count too
        layers = {name: self.layers[name] for name in names}
        return {**layers, "loss": self.loss} if chunk.ends_in_loss else layers

    def _targets(self, batch: Batch) -> np.ndarray:
        if batch.targets is None:
            raise ConfigError("a loss needs targets; make the batch with Batch.of_rows(tokens, targets)")
        self.check_targets(batch.targets)
        return batch.targets

    def _summed_loss(self, logits: Array, targets: np.ndarray) -> tuple[float, CrossEntropyContext]:
        if len(targets) != logits.shape[0]:
            raise ConfigError(f"{len(targets)} targets for {logits.shape[0]} rows of logits; each row needs one")
        losses, ctx = self.loss.forward(logits, from_host(targets, self.device.xp))
        return float(to_host(losses)[targets >= 0].sum(dtype=np.float64)), ctx
