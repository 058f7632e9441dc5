"""Timelines: what the trace viewer is given, waits apart from transfers, and that nothing happens without a tracer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, run_threads
from mpitp.errors import FileError
from mpitp.layers.passes import DropoutState
from mpitp.trace.clock import clock_offset
from mpitp.trace.timeline import check_writable, finish, read_trace
from mpitp.trace.tracer import Tracer, Traffic
from tests.command_on_threads import command_on_threads
from tests.models.model_cases import CONFIGS, make_batch, make_model
from tests.trace.test_ledger import train_traced


def events_of(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The complete events of each rank, in the order in which they began."""
    ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            ranks[event["tid"]].append(event)
    return {rank: sorted(events, key=lambda event: event["ts"]) for rank, events in ranks.items()}


def test_each_rank_has_a_row_of_nested_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_threads(3, train_traced, "llama 9/3", 0, path)
    rows = events_of(path)
    assert sorted(rows) == [0, 1, 2]
    for events in rows.values():
        stack: list[int] = []  # when the events around this one end
        for event in events:
            start, stop = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)  # nanoseconds
            while stack and start >= stack[-1]:
                stack.pop()
            assert not stack or stop <= stack[-1], "events nest"
            stack += [stop] if stop > start else []
        kinds = {event["cat"] for event in events}
        assert {"forward", "backward", "collective", "transfer"} <= kinds
        collective = next(event for event in events if event["name"] == "all_reduce max")
        assert collective["args"]["group"] == "all 3" and collective["args"]["bytes"] == 21 * 4
        assert collective["args"]["layer"] == "loss"


def late_rank(group: Group, path: Path) -> None:
    """Rank 1 comes a tenth of a second late to its first collective."""
    tracer = Tracer()
    traced = tracer.watch(group)
    tracer.attach(make_model(traced, CONFIGS["gpt2"]))
    group.barrier()
    if group.rank == 1:
        time.sleep(0.1)
    traced.all_reduce(np.ones(10))
    traced.broadcast_object("x")
    if group.rank == 0:
        traced.send(np.ones(3), 1)
    if group.rank == 1:
        traced.recv(np.ones(3), 0)
    finish(tracer, group, path, "test")


def test_waits_are_told_apart_from_transfers(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_threads(3, late_rank, path)
    waits = {rank: sum(e["dur"] for e in events if e["name"] == "wait") for rank, events in events_of(path).items()}
    assert min(waits[0], waits[2]) > 80_000 and waits[1] < 40_000  # microseconds
    rows = {row.kind: row for row in read_trace(path).ledger}
    assert rows["all_reduce sum"].wait_seconds > 2 / 3 * 0.08
    assert rows["all_reduce sum"].place == "test_timeline.late_rank"
    assert rows["send"].bytes_by_rank == [24, 0, 0] and rows["recv"].bytes_by_rank == [0, 24, 0]


def test_clocks_of_threads_are_one() -> None:
    assert max(map(abs, run_threads(3, clock_offset))) < 0.02


def test_overlapped_collective_has_two_stays() -> None:
    from mpitp.trace.timeline import stay_of

    entry = Traffic(0, "all", "all_reduce", "sum", (1,), "float32", 4, "", "", 1.0, 2.0, 5.0, 8.0)
    stay = stay_of(entry, {("all", 0): 6.5})
    assert (stay.wait, stay.transfer) == (1.0 + 1.5, 1.5)


def traced_results(group: Group, traced: bool) -> dict[str, Any]:
    tracer = Tracer()
    model = make_model(tracer.watch(group) if traced else group, CONFIGS["gpt2"])
    if traced:
        tracer.attach(model)
    loss, ctx = model.loss_forward(make_batch(model.config, dropout=DropoutState(1, 1)))
    model.loss_backward(ctx, 1.0)
    return {"loss": loss} | {name: param.grad for name, param in model.named_params()}


def test_tracing_changes_no_number_and_leaves_others_alone() -> None:
    for with_tracer, without in zip(
        run_threads(3, traced_results, True), run_threads(3, traced_results, False), strict=True
    ):
        for name, value in without.items():
            np.testing.assert_array_equal(with_tracer[name], value)
    model = run_threads(1, make_model, CONFIGS["gpt2"])[0]
    assert "forward" not in vars(model["embedding"]) and "backward" not in vars(model["blocks.1.mlp.down"])
    Tracer().attach(model)
    assert "forward" in vars(model["embedding"]) and "backward" in vars(model["blocks.1.mlp.down"])


def test_programs_without_a_trace_import_nothing_of_it() -> None:
    code = "import sys, mpitp.train.run, mpitp.train.command, mpitp.infer.command, mpitp.infer.generate; "
    code += "print(*[name for name in sys.modules if name.startswith('mpitp.trace')])"
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def full_trace(group: Group, path: Path) -> None:
    tracer = Tracer(max_events=100)
    model = make_model(tracer.watch(group), CONFIGS["gpt2"], "float32")
    tracer.attach(model)
    for _ in range(5):
        _, ctx = model.loss_forward(make_batch(model.config))
        model.loss_backward(ctx, 1.0)
    finish(tracer, group, path, "train")


def test_long_runs_end_their_trace_at_a_whole_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_threads(2, full_trace, path)
    trace = read_trace(path)
    assert "the first 2 passes" in trace.title
    assert all(row.is_expected for row in trace.ledger)


def make_data(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("A small text, which is read again and again. " * 40)
    assert command_on_threads(
        1, "data", "prepare", str(text), "--tokenizer", "bytes", "--out", str(tmp_path / "data")
    ) == [0]  # fmt: skip
    run = tmp_path / "run.toml"
    run.write_text(f"""
[model]
model_type = "llama"
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 4
intermediate_size = 10
max_position_embeddings = 32
[data]
train = "{tmp_path}/data"
seq_len = 16
[train]
steps = 3
global_batch_size = 2
micro_batch_size = 1
run_dir = "{tmp_path}/run"
[optim]
lr = 1e-3
""")
    return run


def test_train_and_generate_write_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = make_data(tmp_path), tmp_path / "trace.json"
    assert command_on_threads(2, "train", str(run), "--trace", str(path)) == [0, 0]
    printed = capsys.readouterr().out
    assert "model in" in printed and "communication ledger: mpitp train, llama, 2 ranks" in printed
    assert re.search(r"t [\d.]+, h \d+, d \d+, v \d+, p 2, s 4\n", printed), "the letters' values"
    names = {event["name"] for event in events_of(path)[1]}
    assert {"optimizer", "gradient norm", "blocks.0.mlp.down", "all_reduce sum"} <= names
    trace = read_trace(path)
    assert all(row.is_expected for row in trace.ledger)
    assert next(row for row in trace.ledger if row.place == "embedding").calls == 6
    assert command_on_threads(1, "trace", str(path)) == [0]
    assert str(trace) in capsys.readouterr().out
    model = str(tmp_path / "run" / "model")
    words = ("generate", "--model", model, "--prompt", "A", "--max-new-tokens", "3", "--trace", str(path))
    assert command_on_threads(2, *words) == [0, 0]
    told = capsys.readouterr().err
    assert "communication ledger: mpitp generate" in told
    assert re.search(r"t [\d.]+, b 1, h \d+", told), "texts that the head is asked for"
    assert all(row.is_expected for row in read_trace(path).ledger)
    assert command_on_threads(1, "trace", str(path), "--json") == [0]
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(FileError, match="isn't a trace that mpitp has written"):
        read_trace(tmp_path / "other.json")
    (tmp_path / "damaged.json").write_text('{"mpitp": {"title": "", "ranks": 1, "facts": {}, "ledger": [{"x": 1}]}}')
    with pytest.raises(FileError, match="damaged or of another version"):
        read_trace(tmp_path / "damaged.json")
    for path in (tmp_path, tmp_path / "no" / "trace.json"):
        with pytest.raises(FileError, match="can't write the trace"):
            check_writable(path)
