"""Traces of layouts of several axes: closed forms by axis, rows with coordinates, arrows from sends to receives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpitp.backend.device import CpuDevice
from mpitp.comm import Group, run_threads
from mpitp.config import RunConfig
from mpitp.layers.exchange import ExchangeOverEp
from mpitp.layers.partition import split_evenly
from mpitp.trace.arrows import arrows
from mpitp.trace.timeline import Trace, finish
from mpitp.trace.tracer import Tracer, Traffic
from mpitp.train.loop import TrainLoop
from mpitp.train.run import train
from mpitp.train.stop import StopSignals
from mpitp.train.traffic import NORM, OPTIMIZER, replica_traffic
from tests.train.layouts import layout_config
from tests.train.run_case import make_data

LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # ranks, [mesh], other keys
    (4, {"dp": 2, "tp": 2}, {}),
    (2, {"dp": 2}, {"optim_zero": 1, "model_dtype": "bfloat16"}),
    (3, {"dp": 3}, {"optim_zero": 2}),
    (3, {"dp": 3}, {"optim_zero": 3}),
    (4, {"pp": 2, "dp": 2}, {"optim_zero": 3, "train_recompute": "full"}),
    (4, {"dp": 2, "tp": 2, "sequence_parallel": True}, {"optim_zero": 3}),
    (3, {"dp": 3}, {"train_invariant": True, "optim_zero": 1}),
    (4, {"pp": 2, "dp": 2}, {"train_invariant": True}),
    (2, {"pp": 2}, {}),
    (4, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"train_recompute": "full"}),
    (2, {"pp": 2, "schedule": "zb"}, {"train_recompute": "every:2"}),
    (2, {"cp": 2}, {"model_dtype": "bfloat16"}),
    (4, {"cp": 2, "tp": 2, "cp_form": "heads"}, {}),
    (3, {"tp": 3}, {"model_dtype": "float16"}),
    (4, {"ep": 2, "tp": 2, "sequence_parallel": True}, {"model": "mixtral", "train_recompute": "full"}),
    (3, {"ep": 3, "tp": 1}, {"model": "qwen2_moe"}),
    (4, {"pp": 2, "cp": 2}, {"model": "mixtral"}),
    (4, {"dp": 2, "tp": 2, "sequence_parallel": True, "shares": {"dp": [1, 2], "tp": [3, 1]}}, {"model": "llama 9/3"}),
    (
        4,
        {"pp": 2, "dp": 2, "shares": {"pp": [2, 1], "dp": [3, 5]}},
        {"model": "gpt2 untied", "train_global_batch_size": 8},
    ),
    (4, {"ep": 2, "tp": 2, "shares": {"ep": [2, 1], "tp": [1, 2]}}, {"model": "qwen2_moe"}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    make_data(folder)
    return folder


def traced(ranks: int, data: Path, folder: Path, mesh: dict[str, Any], keys: dict[str, Any]) -> Trace:
    """Two steps of a run, traced from the first on, without held-out text."""
    same = {"train_steps": 2, "train_global_batch_size": 4, "data_valid": None, "train_eval_every": 0}
    model, layout = keys.get("model", "gpt2"), {key: value for key, value in keys.items() if key != "model"}
    return traced_run(ranks, layout_config(data, folder / "run", mesh, layout, model, **same), folder)


def traced_run(ranks: int, config: RunConfig, folder: Path) -> Trace:
    """A run, traced from its first step on."""
    reductions: dict[int, Any] = {}

    def rank(group: Group) -> Trace | None:
        tracer = Tracer()

        def observe(loop: TrainLoop) -> None:
            tracer.attach(loop.model)
            loop.train_step.grad_norm = tracer.timed(NORM, loop.train_step.grad_norm)  # type: ignore[assignment]
            loop.optimizer.step = tracer.timed(OPTIMIZER, loop.optimizer.step)  # type: ignore[method-assign]
            reductions[group.rank] = loop.train_step.reduction

        train(config, tracer.watch(group), CpuDevice(), stop=StopSignals(()), observe=observe)
        return finish(tracer, group, folder / "trace.json", "train", replica_traffic(reductions[group.rank], tracer))

    trace = run_threads(ranks, rank)[0]
    assert trace is not None
    return trace


@pytest.mark.parametrize(("ranks", "mesh", "keys"), LAYOUTS, ids=str)
def test_every_axis_sends_what_its_closed_form_says(
    ranks: int, mesh: dict[str, Any], keys: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    trace = traced(ranks, data, tmp_path, mesh, keys)
    assert [str(row) for row in trace.ledger if not row.is_expected] == []
    told = {row.axis for row in trace.ledger if row.formula}
    places = ("buckets.", "gathered.", "reduction.", "runner.send", "runner.expect", "runner.add_others")
    assert [str(row) for row in trace.ledger if row.place.startswith(places) and not row.formula] == []
    assert told >= {axis for axis in ("pp", "dp", "ep", "cp", "tp") if mesh.get(axis, 1) > 1}


def test_rows_in_several_legs_are_as_many_bytes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over(group: Group, num_experts: int, weights: Sequence[float]) -> ExchangeOverEp:
        return ExchangeOverEp(group, split_evenly(num_experts, group.size), 2)

    monkeypatch.setattr(ExchangeOverEp, "over", over)
    trace = traced(2, data, tmp_path, {"ep": 2, "tp": 1}, {"model": "qwen2_moe"})
    assert [str(row) for row in trace.ledger if not row.is_expected] == []
    assert {row.calls for row in trace.ledger if row.kind == "all_to_all" and row.phase == "backward"} == {32}


def test_rows_say_where_ranks_stand_and_arrows_join_them(data: Path, tmp_path: Path) -> None:
    traced(4, data, tmp_path, {"pp": 2, "tp": 2}, {})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0 (pp 0, tp 0)", "rank 1 (pp 0, tp 1)", "rank 2 (pp 1, tp 0)", "rank 3 (pp 1, tp 1)"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sends = [event for event in events if event["ph"] == "X" and event["name"] in ("send", "start send")]
    assert len(starts) == len(sends) > 0 and starts.keys() == ends.keys()
    ways = {(starts[number]["tid"], ends[number]["tid"]) for number in starts}
    assert ways == {(0, 2), (2, 0), (1, 3), (3, 1)}  # between the stages, each with its own place along tp
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts)


def message(op: str, detail: str, start: float) -> Traffic:
    return Traffic(-1, "all 2", op, detail, (1,), "float32", 4, "here", "", start, start + 0.5)


def test_a_message_is_matched_by_tag_and_order() -> None:
    """Receives that were started in another order, of which one has another tag, and one that never came."""
    first, second, other = message("send", "to 1", 0), message("send", "to 1", 1), message("send", "to 1 tag 7", 2)
    lost = message("send", "to 1 tag 9", 3)
    tags = (" tag 7", "", "")
    received = [message("recv", f"from 0{tag}", 5 + i) for i, tag in enumerate(tags)]
    found = arrows([[first, second, other, lost], received])
    expected = [(first, received[1]), (second, received[2]), (other, received[0])]
    assert [(arrow.sent, arrow.received) for arrow in found] == expected
