"""The global gradient norm: every element of every global tensor counted once, in one fixed order.

Each block of each parameter part has a slot in one float64 vector. Its owner writes the block's sum of squares there,
all others leave zero, and the vector is summed over the ranks: exact, since each slot has one contributor. The slots
are then added up by one correctly rounded sum. With a layout whose blocks don't depend on the rank count, neither does
a bit of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.comm.group import Group
from mpitp.comm.mesh import abstract_mesh
from mpitp.layers.param import Param
from mpitp.layers.placement import Index
from mpitp.layers.site import make_site
from mpitp.models.config import DecoderConfig
from mpitp.models.registry import abstract_model
from mpitp.ops.adamw import sum_of_squares

Key = tuple[str, int, tuple[int, ...]]  # parameter, part, place in its global tensor


class GradNorm:
    """Computes the norm of the gradients of `named_params`, of which `group` holds all pieces.

    A rank names the parameters that it has a piece of; they need not be the same on all ranks.
    """

    def __init__(self, named_params: Iterable[tuple[str, Param]], group: Group) -> None:
        self.params, self.group = list(named_params), group
        own = [slot for named in self.params for slot in _owned_blocks(*named)]
        everywhere = sorted(slot for slots in group.all_gather_objects([key for key, _ in own]) for slot in slots)
        place = {key: index for index, key in enumerate(everywhere)}
        assert len(place) == len(everywhere), "a block is owned by two ranks"
        params = dict(self.params)
        self.slots = [(params[key[0]], where, place[key]) for key, where in own]
        self.num_slots = len(everywhere)

    def __call__(self) -> float:
        """The square root of the sum of all squares. Parameters without a gradient count as zero."""
        squares = np.zeros(self.num_slots)
        for param, place, slot in self.slots:
            if param.grad is not None:
                squares[slot] = float(to_host(sum_of_squares(param.grad[place])))
        summed = to_host(self.group.all_reduce(squares))
        return math.sqrt(math.fsum(summed)) if np.isfinite(summed).all() else float("nan")


def clip_scale(norm: float, clip_norm: float) -> float:
    """The factor that brings a gradient of this norm down to `clip_norm` (0: no clipping), as PyTorch computes it."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0


def _owned_blocks(name: str, param: Param) -> Iterator[tuple[Key, Index]]:
    """((parameter, part, first global row of each dim), place in the local array) of each block that this rank owns."""
    numbers = {id(part): number for number, part in enumerate(param.placement.parts)}
    for part, box, place in param.placement.owned_blocks():
        yield (name, numbers[id(part)], tuple(rows.start for rows in box)), place


def norm_slots(config: DecoderConfig, blocks: int) -> int:
    """Numbers in the vector, for dims cut into `blocks` blocks: one for each block of each part."""
    model = abstract_model(config, make_site(abstract_mesh({"tp": 1}), invariant_blocks=blocks))
    return slots_of(model.named_params())


def slots_of(named_params: Iterable[tuple[str, Param]]) -> int:
    """The same of the parameters of a model that one rank holds whole."""
    return sum(1 for _, param in named_params for _ in param.placement.owned_blocks())
