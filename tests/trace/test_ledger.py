"""The ledger equals the closed form in every layout; and the closed form equals sums written down by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpitp.comm import Group, run_threads
from mpitp.infer.generate import generate
from mpitp.models import config_from_hf
from mpitp.trace.timeline import Trace, finish, read_trace
from mpitp.trace.tracer import Tracer
from mpitp.train.step import TrainStep
from tests.models.model_cases import CONFIGS, LATER_RAW, LENGTH, make_batch, make_model, make_optimizer

MODELS = ["gpt2", "llama 9/3", "llama biases, tied, 5/1, llama3"]
RANKS = [1, 2, 3, 4, 5]
STEPS, ROWS = 2, 3
ALL = CONFIGS | {name: config_from_hf(LATER_RAW[name]) for name in ("olmo2", "qwen3")}
TOKENS = ROWS * LENGTH


def train_traced(group: Group, name: str, blocks: int, path: Path, **options: Any) -> Trace | None:
    """Steps of two microbatches each, with the loss once more without a backward pass."""
    tracer = Tracer()
    model = make_model(tracer.watch(group), ALL[name], "float32", invariant_blocks=blocks, **options)
    step = TrainStep(model, make_optimizer(model), 1.0)
    tracer.attach(model)
    for _ in range(STEPS):
        step([make_batch(model.config, ROWS), make_batch(model.config, ROWS, first=3)], 1e-3)
    model.loss_forward(make_batch(model.config, 1))
    return finish(tracer, group, path, "train")


def generate_traced(group: Group, name: str, blocks: int, path: Path) -> Trace | None:
    tracer = Tracer()
    model = make_model(tracer.watch(group), CONFIGS[name], "float32", invariant_blocks=blocks)
    tracer.attach(model)
    generate(model, [[1, 2, 3], [4]], 4, eos_ids=())
    return finish(tracer, group, path, "generate")


def wrong_rows(trace: Trace) -> list[str]:
    return [f"{row}" for row in trace.ledger if not row.is_expected]


@pytest.mark.parametrize("blocks", [0, 5], ids=["plain", "invariant"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_training_sends_what_the_closed_form_says(name: str, ranks: int, blocks: int, tmp_path: Path) -> None:
    trace = run_threads(ranks, train_traced, name, blocks, tmp_path / "trace.json")[0]
    assert wrong_rows(trace) == []
    without_formula = {row.place for row in trace.ledger if row.expected_bytes is None}
    assert without_formula == {"grad_norm.call", "step.agreed"}
    assert len(trace.ledger) - len(without_formula) in (8, 9)  # the ninth: KV heads that live on several ranks


@pytest.mark.parametrize(("name", "blocks", "calls"), [("olmo2", 0, 2), ("olmo2", 5, 2), ("qwen3", 5, 1)])
def test_norms_of_q_and_k_send_what_the_closed_form_says(name: str, blocks: int, calls: int, tmp_path: Path) -> None:
    """Over all heads: two numbers a token, each way; head by head, where dw is added in order: two vectors a pass."""
    trace = run_threads(3, train_traced, name, blocks, tmp_path / "trace.json")[0]
    assert wrong_rows(trace) == []
    assert sum(row.place == "blocks.*.attention.norms" for row in trace.ledger) == calls


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS[:2])
def test_sequence_parallel_sends_what_the_closed_form_says(name: str, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = run_threads(ranks, lambda group: train_traced(group, name, 0, path, sequence_parallel=True))[0]
    assert wrong_rows(trace) == []
    found = {row.key: row.formula for row in trace.ledger if row.formula}
    assert found["all_gather", "blocks.*.attention.qkv", "forward"] == "t/p h s"
    assert found["reduce_scatter", "blocks.*.attention.qkv", "backward"] == "t h s"
    assert found["all_gather", "embedding", "backward"] == "t/p h s"
    assert "sequence-parallel" in str(trace)


@pytest.mark.parametrize("blocks", [0, 5], ids=["plain", "invariant"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS[:2])
def test_generation_sends_what_the_closed_form_says(name: str, ranks: int, blocks: int, tmp_path: Path) -> None:
    trace = run_threads(ranks, generate_traced, name, blocks, tmp_path / "trace.json")[0]
    assert wrong_rows(trace) == []
    orders = {"orders.send", "orders.receive"}  # from the rank that chooses tokens to the others
    assert {row.place for row in trace.ledger} - orders == {
        "embedding", "blocks.*.attention.out", "blocks.*.mlp.down", "layered.gather_logits",
    }  # fmt: skip


def test_closed_form_is_what_a_reader_counts_by_hand(tmp_path: Path) -> None:
    """GPT-2, 2 blocks, width 12, 3 ranks, float32: two all-reduces a block forward and two backward."""
    trace = run_threads(3, train_traced, "gpt2", 0, tmp_path / "trace.json")[0]
    activation = TOKENS * 12 * 4  # bytes of [t, h]
    last = LENGTH * 12 * 4  # the forward pass alone at the end
    passes = 2 * STEPS
    found = {row.key: (row.calls, row.bytes_by_rank) for row in trace.ledger if row.formula}
    assert found == {
        ("all_reduce sum", "embedding", "forward"): (passes + 1, 3 * [passes * activation + last]),
        ("all_reduce sum", "blocks.*.attention.out", "forward"): (
            2 * passes + 2,
            3 * [2 * (passes * activation + last)],
        ),
        ("all_reduce sum", "blocks.*.mlp.down", "forward"): (2 * passes + 2, 3 * [2 * (passes * activation + last)]),
        ("all_reduce max", "loss", "forward"): (passes + 1, 3 * [(passes * TOKENS + LENGTH) * 4]),
        ("all_reduce sum", "loss", "forward"): (passes + 1, 3 * [(passes * TOKENS + LENGTH) * 8]),
        ("all_reduce sum", "head", "backward"): (passes, 3 * [passes * activation]),
        ("all_reduce sum", "blocks.*.mlp.up", "backward"): (2 * passes, 3 * [2 * passes * activation]),
        ("all_reduce sum", "blocks.*.attention.qkv", "backward"): (2 * passes, 3 * [2 * passes * activation]),
    }


def test_replicated_kv_heads_are_summed_in_backward(tmp_path: Path) -> None:
    """9 query and 3 KV heads on 2 ranks: ranks hold KV {0, 1} and {1, 2}, so one head's dk and dv are summed."""
    trace = run_threads(2, train_traced, "llama 9/3", 0, tmp_path / "trace.json")[0]
    (row,) = [row for row in trace.ledger if row.place == "blocks.*.attention.heads"]
    calls = 2 * 2 * STEPS  # blocks, microbatches, steps
    assert (row.calls, row.bytes_by_rank) == (calls, [calls * 2 * TOKENS * 2 * 4] * 2)


def test_written_trace_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = run_threads(2, train_traced, "gpt2", 0, path)[0]
    again = read_trace(path)
    assert again.ledger == trace.ledger
    assert str(again) == str(trace)
    assert "mpitp train, gpt2, 2 ranks, plain layout, float32" in str(trace)


def test_a_collective_that_is_missing_is_seen(tmp_path: Path) -> None:
    trace = run_threads(2, train_traced, "gpt2", 0, tmp_path / "trace.json")[0]
    row = trace.ledger[0]
    row.bytes_by_rank[1] -= 4
    assert "1 rows differ (!)" in str(trace)
    assert f"expected {row.calls} calls" in str(trace)
