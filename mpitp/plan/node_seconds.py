"""How long a node of a graph takes on a machine: each by itself, nothing hidden behind anything else."""

from __future__ import annotations

from collections.abc import Mapping

from mpitp.comm.mesh import AXES
from mpitp.layers.layer import BACKWARD
from mpitp.ops.sight import LONG_TILE, TILE
from mpitp.plan.machine_file import Machine
from mpitp.plan.nodes import Collective, Node, Operation
from mpitp.plan.operations import ATTENTION, PRODUCT
from mpitp.plan.sums import Span, collective_seconds
from mpitp.plan.work import PRODUCTS_OF_TILE, Scores, Work, seconds_of


def spread(sizes: Mapping[str, int], axes: tuple[str, ...], per_node: int) -> Span:
    """The ranks of a group along some axes, where the job's ranks fill nodes one after the other.

    >>> spread({"pp": 2, "dp": 1, "ep": 1, "cp": 1, "tp": 8}, ("tp",), 4)
    Span(in_node=4, nodes=2)
    """
    members = [0]
    stride = 1
    for axis in reversed(AXES):
        if axis in axes:
            members = [member + stride * i for i in range(sizes[axis]) for member in members]
        stride *= sizes[axis]
    nodes = len({member // per_node for member in members})
    return Span(-(-len(members) // nodes), nodes)


def node_seconds(node: Node, machine: Machine, sizes: Mapping[str, int], dtype: str) -> float:
    """Of one pass of a node, on a mesh of these sizes."""
    if isinstance(node, Collective):
        span = spread(sizes, tuple(node.axis.split("+")), machine.machine.ranks_per_node)
        each = float(node.given_bytes) / max(node.calls, 1)
        whole = each * node.ranks if node.op == "all_gather" else each
        return node.calls * collective_seconds(node.op, whole, span, machine)
    assert isinstance(node, Operation)
    if node.kind == "optimizer":
        return node.moved_bytes / machine.compute.optimizer_bytes_per_second
    return seconds_of(node_work(node), machine, dtype).total


def node_work(node: Operation) -> Work:
    """Of one pass, by the node's numbers alone: y = x W^T, or dx = dy W and dW = dy^T x; attention in whole tiles; of
    all else its bytes.
    """
    turn = node.phase == BACKWARD
    if node.kind == PRODUCT:
        t, n, k = node.shape
        if turn and node.flops == 2 * t * n * k:  # of pixels, which have no gradient
            return Work(((n, k, t, 1),))
        return Work(((t, k, n, 1), (n, k, t, 1)) if turn else ((t, n, k, 1),))
    if node.kind == ATTENTION:
        width, length = node.shape[2], node.shape[0]
        area = node.flops / (2 * PRODUCTS_OF_TILE[turn] * width)  # elements of scores
        return Work(scores=(Scores(length, width, area, area / (TILE * LONG_TILE), (TILE, LONG_TILE), turn),))
    return Work(passes=(node.moved_bytes,))
