"""`--shares`: how much of the model each rank gets, where ranks are of unequal speed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpitp.error_stream import tell
from mpitp.errors import UsageError

if TYPE_CHECKING:
    from mpitp.backend.device import Device
    from mpitp.comm.group import Group
    from mpitp.comm.mesh import Mesh

MEASURED = "measured"


def add_argument(parser: argparse._ActionsContainer) -> None:
    """The option."""
    parser.add_argument(
        "--shares",
        type=_shares,
        default=(),
        metavar="W,W,...|measured",
        help="a weight a rank, by which heads, columns and vocabulary are dealt; measured: the ranks' speeds",
    )


def mesh_of(args: argparse.Namespace, world: Group, device: Device, hidden: int = 512) -> Mesh:
    """All ranks along tp, with the weights that `args` name; a collective. `hidden`: the model's width.

    Raises UsageError for another number of weights than ranks.
    """
    from mpitp.comm.mesh import make_mesh

    if args.shares == MEASURED:
        return make_mesh(world, weights=_measured(args, world, device, hidden))
    if args.shares and len(args.shares) != world.size:
        given = ",".join(f"{weight:g}" for weight in args.shares)
        raise UsageError(f"--shares {given} names {len(args.shares)} weights, and the job has {world.size} ranks")
    return make_mesh(world, weights={"tp": args.shares} if args.shares else {})


def _measured(args: argparse.Namespace, world: Group, device: Device, hidden: int) -> dict[str, tuple[float, ...]]:
    from mpitp.comm.mesh import AXES
    from mpitp.layers.speeds import measure_speeds, told, weights_of_speeds

    speeds = measure_speeds(world, device, args.dtype, hidden)
    sizes = dict.fromkeys(AXES, 1) | {"tp": world.size}
    weights = world.broadcast_object(weights_of_speeds(speeds, sizes))
    if world.rank == 0:
        tell([f"--shares measured: {told(speeds, weights)}"])
    return weights


def _shares(text: str) -> str | tuple[float, ...]:
    if text == MEASURED:
        return text
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        weights = ()
    if not weights or not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise argparse.ArgumentTypeError(f"{text!r}: expected measured, or weights of at least 0, one above 0: 2,1")
    return weights
