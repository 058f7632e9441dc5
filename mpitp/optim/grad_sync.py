"""Sums what backward left as summands: for every parameter, over the axes along which its gradient is partial.

Which these are follows from the placements alone (`Placement.partial`): along axes of data every parameter's gradient,
along tp none, since the layers themselves sum what their replicas need. Parameters that are partial along the same
axes are summed one after the other in their order, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpitp.comm.mesh import Mesh
from mpitp.layers.param import Param


def sync_gradients(params: Iterable[Param], mesh: Mesh) -> None:
    """Make every gradient whole, on every rank. A collective over the axes that are named; a parameter without a
    gradient counts as zero there.
    """
    started = []
    for param in params:
        if not param.placement.partial:
            continue
        started.append((param, mesh.along(*param.placement.partial).start_all_reduce(param.grad_or_zeros())))
    for param, pending in started:
        param.grad = pending.wait()
