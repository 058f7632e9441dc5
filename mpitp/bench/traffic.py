r"""What a training step hands to the collectives, in closed form: the sends of its layers, and what the step adds.

With t tokens, width h, L blocks and w bytes a number, every rank of a tensor-parallel group of p > 1 takes part in

    embedding        1 sum  of t h w                              forward
    blocks           2 L    of t h w forward (attention, MLP), 2 L of t h w backward; over nodes, where sums run behind
                            products, those forward may come in pieces
    head             1      of t h w backward
    loss             1 maximum of t w and 1 sum of 2 t w          forward
    KV gradients     L      of 2 t d w for every KV head that several ranks hold   backward
    gradient norm    1      of 8 bytes for every block of every parameter part
    agreement        1 broadcast of 16 bytes (loss and norm)

a step of one microbatch. "Bytes" are those of the array that a rank hands over; what a library puts on the wire for it
is its own affair (a ring moves 2 (p - 1) / p of it each way).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpitp.comm.mesh import abstract_mesh
from mpitp.layers.layer import FORWARD, walk
from mpitp.layers.linear import RowParallelLinear
from mpitp.layers.site import make_site
from mpitp.models.config import DecoderConfig
from mpitp.models.registry import abstract_model
from mpitp.optim.grad_norm import norm_slots
from mpitp.trace.traffic import folded


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Collectives of one kind in a step: how many, and the bytes a rank hands to them in all."""

    what: str
    calls: int
    total_bytes: int


def step_traffic(
    config: DecoderConfig, ranks: int, tokens: int, itemsize: int, num_blocks: int = 0, pieces: int = 1
) -> list[StepTraffic]:
    """The traffic of one step of one microbatch on each rank; empty for one rank. `pieces`: of a forward sum."""
    if ranks == 1:
        return []
    model = abstract_model(config, make_site(abstract_mesh({"tp": ranks}), invariant_blocks=num_blocks))
    rows: dict[str, StepTraffic] = {}
    for name, layer in walk(model.all_layers()):
        for send in layer.sends():
            calls = send.calls * (pieces if isinstance(layer, RowParallelLinear) and send.phase == FORWARD else 1)
            size = send.calls * tokens * send.width * itemsize
            what = f"{folded(name)} {send.phase}"
            row = rows.get(what, StepTraffic(what, 0, 0))
            rows[what] = replace(row, calls=row.calls + calls, total_bytes=row.total_bytes + size)
    norm = StepTraffic("gradient norm", 1, 8 * norm_slots(config, num_blocks or ranks))
    return [*rows.values(), norm, StepTraffic("agreement", 1, 16)]
