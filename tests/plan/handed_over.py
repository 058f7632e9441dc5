"""Bytes that a step's collectives hand over, by axis: those that a traced run counted, and those of its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction

from mpitp.plan.nodes import Collective
from mpitp.plan.step_graph import StageGraph
from mpitp.trace.ledger import LedgerRow
from mpitp.trace.timeline import Trace


def by_trace(trace: Trace, ranks_of: Callable[[LedgerRow], Sequence[int]]) -> dict[str, Fraction]:
    """The mean of the ranks that `ranks_of` names for a row."""
    found: defaultdict[str, Fraction] = defaultdict(Fraction)
    for row in trace.ledger:
        if row.formula and row.kind != "recv":
            ranks = ranks_of(row)
            found[row.axis] += Fraction(sum(row.bytes_by_rank[rank] for rank in ranks), len(ranks))
    return found


def by_graph(stage: StageGraph) -> dict[str, Fraction]:
    """On the first rank of a stage."""
    found: defaultdict[str, Fraction] = defaultdict(Fraction)
    for node in stage.first.collectives:
        if node.op != "recv":
            found[node.axis] += node.given_bytes * node.passes * stage.microbatches
    for node in stage.update:
        if isinstance(node, Collective) and node.op != "broadcast" and node.layer != "gradient norm":
            found[node.axis] += node.given_bytes
    return found
