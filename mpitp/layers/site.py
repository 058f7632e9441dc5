"""The site: what a model is laid on. Everything that makes layers or parameters takes one, and nothing else of the
kind.

    site = make_site(mesh, dtype="float32")        or make_site(group): all of its ranks along tp
    model = load_model("models/smollm2", site)

It is the door for layers of one's own: it deals units to the ranks, makes parameters, and has the sum of each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitp.backend.device import AbstractDevice, CpuDevice, Device
from mpitp.comm.group import Group
from mpitp.comm.mesh import AXES, Mesh, make_mesh
from mpitp.errors import ConfigError
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare, Share, piece_of, share_heads, share_of
from mpitp.layers.placement import Cut, Part, Placement
from mpitp.layers.summation import LibrarySum, OrderedSum, Summation

DATA_AXES = ("dp", "ep", "cp")  # along these each rank has other rows of the batch


@dataclass(frozen=True, slots=True)
class Site:
    """Mesh, device and dtype of a model, and into how many blocks each cut dim is divided (0: one a rank).

    `sequence_parallel`: between the products that are cut over tp, each of its ranks has rows of tokens of its own.
    `cp_form`: how queries meet the keys of other ranks along cp, "ring" or "heads" (`keys.py`).
    """

    mesh: Mesh
    device: Device
    dtype: np.dtype
    num_blocks: int = 0
    sequence_parallel: bool = False
    cp_form: str = "ring"

    def __post_init__(self) -> None:
        if self.mesh.sizes["cp"] > 1 and self.num_blocks:
            raise ConfigError(
                "context parallelism has no invariant mode: where a sequence is cut decides in which pieces its keys, "
                "and the gradients of all weights, are added up; leave out one of the two"
            )
        if self.sequence_parallel and self.num_blocks:
            raise ConfigError(
                "sequence parallelism has no invariant mode: the gradient of a norm's weight is first summed over the "
                "tokens of each rank, and where those are cut depends on the number of ranks; leave out one of the two"
            )

    @property
    def ranks(self) -> Group:
        """All ranks that hold a piece of the model, of all stages."""
        return self.mesh.world

    @property
    def tp(self) -> Group:
        """The ranks along which layers are split."""
        return self.mesh["tp"]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which arrays have a type: tp, and what the mesh has more than one rank along. Not pp: the
        stages of a pipeline have different layers, not pieces of the same arrays.
        """
        return tuple(axis for axis in AXES if axis == "tp" or (axis != "pp" and self.mesh.sizes[axis] > 1))

    @property
    def batch_type(self) -> ArrayType:
        """Of the ids that go in: the same on all ranks of tp, other samples along the axes of data."""
        return ArrayType.of(self.axes, **{axis: VARYING for axis in self.axes if axis in DATA_AXES})

    @property
    def shard_type(self) -> ArrayType:
        """Of activations between the cut products."""
        return self.batch_type.changed("tp", VARYING) if self.sequence_parallel else self.batch_type

    def abstract(self) -> Site:
        """The same without memory: for parameters that are counted or checked only."""
        return replace(self, device=AbstractDevice())

    def on_one_rank(self) -> Site:
        """The serial site that this one is compared with."""
        from mpitp.comm.serial import SerialGroup

        return replace(self, mesh=make_mesh(SerialGroup()), sequence_parallel=False)

    def summation(self, axis: str = "tp") -> Summation:
        """How partial sums along `axis` are added."""
        group = self.mesh[axis]
        return OrderedSum(group) if self.num_blocks else LibrarySum(group)

    def share(self, units: int, axis: str = "tp") -> Share:
        """This rank's share of `units`, by the weights of the ranks along `axis` where the mesh has such."""
        group = self.mesh[axis]
        return share_of(units, group.rank, group.size, self.num_blocks, self.mesh.weights(axis))

    def token_share(self, tokens: int) -> range:
        """Which of the rows of tokens lie on this rank between the cut products: all, unless `sequence_parallel`."""
        if not self.sequence_parallel:
            return range(tokens)
        return piece_of(tokens, self.tp.rank, self.tp.size, self.mesh.weights("tp"))

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes along which a rank has only some of the tokens there: gradients of what they meet are partial."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have other tokens of the same microbatch between the cut products."""
        return tuple(axis for axis in self.axes if axis == "cp" or axis in self.shard_axes)

    def share_of_few(self, units: int) -> Share:
        """This rank's share of units that may be fewer than the blocks: classes."""
        blocks = min(self.num_blocks, units)
        return share_of(units, self.tp.rank, self.tp.size, blocks, self.mesh.weights("tp"))

    def heads(self, heads: int, kv_heads: int, axis: str = "tp") -> HeadShare:
        """This rank's attention heads."""
        group = self.mesh[axis]
        return share_heads(heads, kv_heads, group.rank, group.size, self.num_blocks, self.mesh.weights(axis))

    def placement(self, parts: Sequence[Part], fused: int = 0, partial: Sequence[str] = ()) -> Placement:
        """Where a parameter with these parts lies. `partial`: axes along which its gradient is a summand besides those
        of data, along which every parameter's is.
        """
        cut = {dim.axis for part in parts for dim in part.dims}
        others = [axis for axis in self.axes if axis not in cut]
        summed = frozenset(axis for axis in others if axis in DATA_AXES or axis in partial)
        return Placement(tuple(parts), fused, summed, all(self.mesh[axis].rank == 0 for axis in others))

    def param(self, placement: Placement, *, std: float = 0.0, value: float = 0.0, decay: bool = False) -> Param:
        """A parameter of zeros; loading or `layers/init.py` fills it, with `std` and `value`."""
        return Param(self.device.zeros(placement.shape, self.dtype), placement, std, value, decay)

    def whole(self, *shape: int, std: float = 0.0, value: float = 0.0, partial: Sequence[str] = ()) -> Param:
        """A parameter that every rank of tp holds whole. A matrix decays, a vector doesn't."""
        parts = [Part("", tuple(Cut.whole(size) for size in shape))]
        return self.param(self.placement(parts, partial=partial), std=std, value=value, decay=len(shape) > 1)

    def check_blocks(self, sizes: dict[str, int]) -> None:
        """Refuse an invariant site that `sizes` (name of a cut dim: its units) can't give."""
        if not self.num_blocks:
            return
        limit, ranks = min(sizes.values()), self.tp.size
        scarce = min(sizes, key=sizes.__getitem__)
        if self.num_blocks > limit:
            raise ConfigError(
                f"invariant_blocks={self.num_blocks} exceeds {scarce}={limit}: a block needs at least one unit of "
                f"every cut dimension; use a number from {ranks} to {limit}"
                if ranks <= limit
                else f"invariant mode can cut this model into at most {limit} blocks ({scarce}={limit}), "
                f"fewer than the {ranks} ranks; use at most {limit} ranks"
            )
        if ranks > self.num_blocks:
            more = f" or set invariant_blocks to a number up to {limit}" if ranks <= limit else ""
            raise ConfigError(
                f"invariant mode deals whole blocks: {self.num_blocks} blocks can't go to {ranks} ranks; "
                f"use at most {self.num_blocks} ranks{more}"
            )


def make_site(
    ranks: Mesh | Group,
    *,
    dtype: Any = "float32",
    device: Device | None = None,
    invariant_blocks: int = 0,
    sequence_parallel: bool = False,
    cp_form: str = "ring",
) -> Site:
    """A site on a mesh, or on a group whose ranks all lie along tp. `invariant_blocks` > 0: results that are equal to
    the last bit at any rank count up to it. `sequence_parallel`: for training and evaluation; generation goes without.
    """
    mesh = make_mesh(ranks) if isinstance(ranks, Group) else ranks
    return Site(mesh, device or CpuDevice(), np.dtype(dtype), invariant_blocks, sequence_parallel, cp_form)


def choose_blocks(invariant: bool, blocks: int, heads: int) -> int:
    """The number of blocks for a user's wish: 0 unless `invariant`; `blocks` 0 takes one a head, at most 12.

    The choice must not depend on the rank count, or results would. Raises ConfigError for blocks without the mode.
    """
    if blocks and not invariant:
        raise ConfigError(
            f"{blocks} blocks are asked for, but not the invariant mode; add --invariant, or drop the blocks"
        )
    if not invariant:
        return 0
    return blocks or min(heads, 12)
