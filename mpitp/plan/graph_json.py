"""An operator graph as data: every node of every stage, for other programs."""

from __future__ import annotations

from typing import Any

from mpitp.plan.graph_text import Seconds
from mpitp.plan.nodes import Collective, Node, Operation, RankGraph
from mpitp.plan.step_graph import StageGraph, StepGraph


def graph_json(graph: StepGraph, seconds: Seconds | None = None) -> dict[str, Any]:
    """Plain dictionaries; bytes and flops are those of one pass of one rank."""
    return {
        "model_type": graph.model_type, "dtype": graph.dtype, "ranks": graph.ranks, "mesh": graph.sizes,
        "tokens": graph.tokens, "schedule": graph.schedule,
        "stages": [_stage(stage, seconds) for stage in graph.stages],
    }  # fmt: skip


def _stage(stage: StageGraph, seconds: Seconds | None) -> dict[str, Any]:
    return {
        "stage": stage.stage, "chunks": [list(own) for own in stage.chunks], "microbatches": stage.microbatches,
        "parameters": stage.params, "flops": stage.flops(),
        "first_rank": _nodes(stage.first, seconds), "last_rank": _nodes(stage.last, seconds),
        "update": [_node(node, seconds) for node in stage.update],
    }  # fmt: skip


def _nodes(graph: RankGraph, seconds: Seconds | None) -> list[dict[str, Any]]:
    return [_node(node, seconds) for node in graph.nodes.values()]


def _node(node: Node, seconds: Seconds | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": node.name, "layer": node.layer, "pass": node.phase, "inputs": list(node.inputs)}
    if node.output is not None:
        out = node.output
        found["output"] = {"shape": [out.rows, out.width], "bytes": out.num_bytes, "types": dict(out.letters)}
    found["passes"] = node.passes
    if isinstance(node, Collective):
        found |= {
            "collective": node.op, "axis": node.axis, "ranks": node.ranks, "calls": node.calls,
            "given_bytes": float(node.given_bytes), "wire_bytes": node.wire_bytes,
        }  # fmt: skip
    if isinstance(node, Operation):
        found |= {
            "kind": node.kind,
            "flops": node.flops,
            "moved_bytes": node.moved_bytes,
            "kept_bytes": node.kept_bytes,
        }
    return found | ({"seconds": seconds(node)} if seconds else {})
