"""How long a node of a graph takes on a machine: each by itself, nothing hidden behind anything else."""

from __future__ import annotations

from collections.abc import Mapping

from mpitp.comm.mesh import AXES
from mpitp.layers.layer import BACKWARD
from mpitp.ops.sight import LONG_TILE, TILE
from mpitp.plan.graph import Collective, Node, Operation
from mpitp.plan.machine_file import Machine
from mpitp.plan.operations import ATTENTION, PRODUCT

HALVES = ("all_gather", "reduce_scatter")  # each is half of an all-reduce
MESSAGES = ("send", "recv")
HEAD_WIDTH = 64  # as most models have it: the rate of a tile's products hardly depends on it


def spread(sizes: Mapping[str, int], axes: tuple[str, ...], per_node: int) -> tuple[int, int]:
    """(ranks in each node, nodes) of a group along some axes, where the job's ranks fill nodes one after the other.

    >>> spread({"pp": 2, "dp": 1, "ep": 1, "cp": 1, "tp": 8}, ("tp",), 4)
    (4, 2)
    """
    members = [0]
    stride = 1
    for axis in reversed(AXES):
        if axis in axes:
            members = [member + stride * i for i in range(sizes[axis]) for member in members]
        stride *= sizes[axis]
    nodes = len({member // per_node for member in members})
    return -(-len(members) // nodes), nodes


def node_seconds(node: Node, machine: Machine, sizes: Mapping[str, int], dtype: str) -> float:
    """Of one pass of a node, on a mesh of these sizes."""
    if isinstance(node, Collective):
        return _collective(node, machine, sizes)
    assert isinstance(node, Operation)
    if node.kind == "optimizer":
        return node.moved_bytes / machine.compute.optimizer_bytes_per_second
    if node.kind == PRODUCT:
        return _product(node, machine, dtype)
    if node.kind == ATTENTION:
        return node.flops / machine.products.rate(dtype, TILE, LONG_TILE, HEAD_WIDTH)
    return machine.compute.pass_seconds(node.moved_bytes)


def _product(node: Operation, machine: Machine, dtype: str) -> float:
    """y = x W^T; or dx = dy W and dW = dy^T x."""
    t, n, k = node.shape
    if not t * n * k:
        return 0.0
    shapes = [(t, k, n), (n, k, t)] if node.phase == BACKWARD else [(t, n, k)]
    each = node.flops / len(shapes)
    start = machine.compute.operation_seconds * len(shapes)
    return start + sum(each / machine.products.rate(dtype, *shape) for shape in shapes)


def _collective(node: Collective, machine: Machine, sizes: Mapping[str, int]) -> float:
    in_node, nodes = spread(sizes, tuple(node.axis.split("+")), machine.machine.ranks_per_node)
    each = float(node.given_bytes) / max(node.calls, 1)
    if node.op in MESSAGES or node.op == "broadcast":
        return 0.0 if node.op == "recv" else node.calls * machine.send(each, is_wide=nodes > 1)
    whole = each * node.ranks if node.op == "all_gather" else each
    share = 0.5 if node.op in HALVES or node.op == "all_to_all" else 1.0
    return node.calls * machine.sum_seconds(whole, in_node, nodes, share)
