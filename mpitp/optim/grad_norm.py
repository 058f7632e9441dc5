"""The global gradient norm: every element of every global tensor counted once, in one fixed order.

Each block of each parameter part has a slot in one float64 vector. Its owner writes the block's sum of squares there,
all others leave zero, and the vector is summed over the ranks: exact, since each slot has one contributor. The slots
are then added up by one correctly rounded sum. With a layout whose blocks don't depend on the rank count, neither does
a bit of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.comm.group import Group
from mpitp.layers.param import Param, Part
from mpitp.ops.adamw import sum_of_squares

Array = Any


class GradNorm:
    """Computes the norm of the gradients of `named_params`, which are cut over `group`."""

    def __init__(self, named_params: Iterable[tuple[str, Param]], group: Group) -> None:
        self.params, self.group = list(named_params), group
        own = [slot for i, (_, param) in enumerate(self.params) for slot in _owned_blocks(i, param)]
        everywhere = sorted(slot for slots in group.all_gather_objects([key for key, _ in own]) for slot in slots)
        place = {key: index for index, key in enumerate(everywhere)}
        assert len(place) == len(everywhere), "a block is owned by two ranks"
        self.slots = [(key[0], rows, place[key]) for key, rows in own]
        self.num_slots = len(everywhere)

    def __call__(self) -> float:
        """The square root of the sum of all squares. Parameters without a gradient count as zero."""
        squares = np.zeros(self.num_slots)
        for index, rows, slot in self.slots:
            param = self.params[index][1]
            if param.grad is not None:
                squares[slot] = float(to_host(sum_of_squares(param.spec.view(param.grad, rows))))
        summed = to_host(self.group.all_reduce(squares))
        return math.sqrt(math.fsum(summed)) if np.isfinite(summed).all() else float("nan")


def _owned_blocks(index: int, param: Param) -> Iterator[tuple[tuple[int, int, int], slice]]:
    """((parameter, part, first global row), local rows) of each block that this rank owns."""
    for part_index, (part, rows) in enumerate(param.spec.local_parts()):
        for block in _owned(part):
            local = block.start - part.held.start + rows.start
            yield (index, part_index, block.start), slice(local, local + len(block))


def _owned(part: Part) -> Iterator[range]:
    for block in part.blocks:
        cut = range(max(block.start, part.owned.start), min(block.stop, part.owned.stop))
        if len(cut):
            yield cut
