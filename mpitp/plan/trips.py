r"""Seconds of the rows' ways over ep, to their experts and home, as `layers/experts.py` hides them.

T of one way (`Machine.all_to_all_seconds`). In a node a rank's rows travel as one leg, between nodes as two, where a
rank has several experts; then half of what is done to the rows, P/2, is done while the other half is on its way:

    forward    there: behind the shared expert, and the second leg behind P/2 of the first one's
               back:  the first leg behind P/2 of the second one's, the last behind nothing
    backward   the same, and all of the way back also behind the product for down's gradient

In no case is more hidden than the part of a transfer that the machine moves on behind products (`overlap`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitp.layers.exchange import MOST_LEGS
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.layers.mixture import MixtureOfExperts
from mpitp.plan.kept import Sizes
from mpitp.plan.machine_file import Machine
from mpitp.plan.sums import Span, Waits


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds of what is done while rows travel, forward and backward: the shared expert, the experts' own work on
    their rows; of the product for down's gradient.
    """

    shared: tuple[float, float]
    experts: tuple[float, float]
    down: float


def trips_of(mixture: MixtureOfExperts, span: Span, s: Sizes, beside: Beside, machine: Machine) -> Waits:
    """Of all rows of a microbatch, both ways, forward and backward; and of how many there are, which is said first."""
    experts = mixture.experts
    own, _, hidden = experts.gate_up.shape
    num_bytes = s.rows * experts.sizes.top_k * hidden * s.item
    way = machine.all_to_all_seconds(num_bytes, span.in_node, span.nodes)
    said = machine.all_to_all_seconds(8 * experts.sizes.num_experts, span.in_node, span.nodes)
    legs = min(MOST_LEGS, own) if span.nodes > 1 else 1
    most = machine.overlap(span.nodes) * way
    forward, backward = (_hidden(way, legs, beside, turn, most) for turn in (FORWARD, BACKWARD))
    return Waits(said + 2 * way - forward, 2 * way - backward, forward + backward)


def _hidden(way: float, legs: int, beside: Beside, turn: str, most: float) -> float:
    """Of both ways in one direction; `most` of each."""
    is_back = turn == BACKWARD
    shared, half, down = beside.shared[is_back], beside.experts[is_back] / 2, beside.down * is_back
    if legs == 1:
        return min(most, shared) + min(most, down)
    leg = way / 2
    first = min(leg, shared)
    there = first + min(leg, shared - first + half)
    back = min(leg, half) + min(leg, down)
    return min(most, there) + min(most, back)
