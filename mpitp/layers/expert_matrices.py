r"""The matrices of a rank's experts, one behind the other: W [e/ep, n, k], of floats, or in 8 or 4 bits.

Rows come sorted by expert, `counts` of each of `experts`, a run of the own ones; each meets its expert's matrix alone
(`ops/grouped.py`). What an expert's matrix is made of, the experts' layer doesn't know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.layers.groupwise import codes_and_scales
from mpitp.layers.param import Param
from mpitp.layers.placement import Placement
from mpitp.layers.site import Site
from mpitp.ops.grouped import (
    grouped_forward,
    grouped_input_grad,
    grouped_weight_grad,
    groupwise_grouped_forward,
    groupwise_grouped_input_grad,
)
from mpitp.ops.groupwise import Grouping, Multiply, groupwise_forward

SCALES = "_scale"  # behind the name of matrices in groups: that of their scales


class ExpertMatrices(ABC):
    """W [e/ep, n, k]."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Of this rank's part."""

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """How W is cut."""

    @abstractmethod
    def params(self, name: str) -> Mapping[str, Param]:
        """What it is stored as, where W is called `name`."""

    @abstractmethod
    def forward(self, x: Array, experts: slice, counts: np.ndarray) -> Array:
        """y [t, n] of x [t, k]."""

    @abstractmethod
    def input_grad(self, dy: Array, experts: slice, counts: np.ndarray) -> Array:
        """dx [t, k] of dy [t, n]."""

    @abstractmethod
    def accumulate_grads(self, dys: Sequence[Array], xs: Sequence[Array], counts: Sequence[np.ndarray]) -> None:
        """Add dW = dy^T x of every expert; the rows come in several pieces, each with those of the next experts."""


@dataclass(frozen=True, slots=True)
class DenseMatrices(ExpertMatrices):
    """Of floats."""

    weight: Param

    @property
    def shape(self) -> tuple[int, int, int]:
        e, n, k = self.weight.data.shape
        return e, n, k

    @property
    def placement(self) -> Placement:
        return self.weight.placement

    def params(self, name: str) -> Mapping[str, Param]:
        return {name: self.weight}

    def forward(self, x: Array, experts: slice, counts: np.ndarray) -> Array:
        return grouped_forward(x, self.weight.data[experts], counts)

    def input_grad(self, dy: Array, experts: slice, counts: np.ndarray) -> Array:
        return grouped_input_grad(dy, self.weight.data[experts], counts)

    def accumulate_grads(self, dys: Sequence[Array], xs: Sequence[Array], counts: Sequence[np.ndarray]) -> None:
        weight = self.weight
        weight.accumulate_made(lambda: grouped_weight_grad(dys, xs, counts, weight.grad_dtype))


@dataclass(frozen=True, slots=True)
class GroupwiseMatrices(ExpertMatrices):
    """Codes [e/ep, n, k * bits / 8] and scales [e/ep, n, k/g] (`layers/groupwise.py`). Loaded, never trained."""

    codes: Param
    scales: Param
    grouping: Grouping
    whole: Placement
    multiply: Multiply = groupwise_forward

    @property
    def shape(self) -> tuple[int, int, int]:
        e, n, _ = self.scales.data.shape
        return e, n, self.grouping.groups_in(self.scales.data) * self.grouping.size

    @property
    def placement(self) -> Placement:
        return self.whole

    def params(self, name: str) -> Mapping[str, Param]:
        return {name: self.codes, name + SCALES: self.scales}

    def forward(self, x: Array, experts: slice, counts: np.ndarray) -> Array:
        codes, scales = self.codes.data[experts], self.scales.data[experts]
        return groupwise_grouped_forward(x, codes, scales, self.grouping, counts, self.multiply)

    def input_grad(self, dy: Array, experts: slice, counts: np.ndarray) -> Array:
        codes, scales = self.codes.data[experts], self.scales.data[experts]
        return groupwise_grouped_input_grad(dy, codes, scales, self.grouping, counts)

    def accumulate_grads(self, dys: Sequence[Array], xs: Sequence[Array], counts: Sequence[np.ndarray]) -> None:
        """Nothing: whole numbers have no gradient."""


def groupwise_matrices(site: Site, placement: Placement, grouping: Grouping) -> GroupwiseMatrices:
    """Those that are cut like `placement`, all zero. Raises ConfigError where a cut parts a group."""
    return GroupwiseMatrices(*codes_and_scales(site, placement, grouping), grouping, placement)
