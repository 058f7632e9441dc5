"""Layouts that equal one rank, one table for each axis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.layouts import check_layout, check_resumed

DATA: list[tuple[int, dict[str, int], dict[str, Any]]] = [  # ranks, [mesh], what both runs have
    (2, {"dp": 2}, {}),  # 3 + 2 microbatches
    (3, {"dp": 3}, {"model": "llama 9/3", "train_global_batch_size": 4}),
    (4, {"dp": 2, "tp": 2}, {"model": "llama biases, tied, 5/1, llama3"}),
    (4, {"dp": 4}, {"train_global_batch_size": 2}),  # two replicas have nothing to do
    (6, {"dp": 2, "tp": 3}, {"model": "gpt2 untied", "train_global_batch_size": 6, "train_micro_batch_size": 2}),
]

FEW = {"train_steps": 2, "checkpoint_every": 2, "train_global_batch_size": 3}
CONTEXT: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"cp": 2}, {"train_global_batch_size": 4, "train_micro_batch_size": 2}),
    (5, {"cp": 5}, {"model": "llama 9/3", "data_seq_len": 11, **FEW}),  # ten pieces
    (3, {"cp": 3, "cp_form": "heads"}, {**FEW, "train_global_batch_size": 4, "train_micro_batch_size": 2}),
    (4, {"cp": 4, "cp_form": "heads"}, {"model": "llama biases, tied, 5/1, llama3", **FEW}),
    (4, {"cp": 2, "tp": 2}, {"model": "llama 9/3", **FEW}),  # KV heads on both tp ranks
    (6, {"cp": 2, "tp": 3, "cp_form": "heads"}, {"model": "llama biases, tied, 5/1, llama3", **FEW}),
    (6, {"cp": 3, "tp": 2, "sequence_parallel": True}, {"model": "qwen2 6/2, tied", **FEW}),
    (4, {"dp": 2, "cp": 2}, {"model": "llama biases, tied, 5/1, llama3"}),
]


@pytest.mark.parametrize(("ranks", "mesh", "same"), CONTEXT, ids=str)
def test_context_parallelism(ranks: int, mesh: dict[str, Any], same: dict[str, Any]) -> None:
    check_layout(ranks, mesh, **same)


@pytest.mark.parametrize(("ranks", "mesh", "same"), DATA, ids=str)
def test_data_parallelism(ranks: int, mesh: dict[str, int], same: dict[str, Any]) -> None:
    check_layout(ranks, mesh, **same)


ZERO: list[tuple[int, dict[str, int], dict[str, Any], dict[str, Any]]] = [  # ranks, [mesh], other keys, what both have
    (2, {"dp": 2}, {"zero": 1}, {"train_global_batch_size": 4}),
    (4, {"dp": 2, "tp": 2}, {"zero": 1, "bucket_mib": 1e-4}, {"model": "llama biases, tied, 5/1, llama3"}),
    (3, {"dp": 3}, {"zero": 2, "bucket_mib": 2e-3}, {"train_global_batch_size": 4}),
    (4, {"dp": 2, "tp": 2}, {"zero": 2}, {"model": "llama 9/3"}),
    (2, {"dp": 2}, {"zero": 3}, {}),
    (3, {"dp": 3}, {"zero": 3}, {"model": "llama 9/3", "train_global_batch_size": 2}),
    (4, {"dp": 2, "tp": 2}, {"zero": 3}, {"model": "llama biases, tied, 5/1, llama3"}),
]


@pytest.mark.parametrize(("ranks", "mesh", "optim", "same"), ZERO, ids=str)
def test_zero(ranks: int, mesh: dict[str, int], optim: dict[str, Any], same: dict[str, Any]) -> None:
    check_layout(ranks, mesh, {f"optim_{key}": value for key, value in optim.items()}, **same)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("ranks", "mesh"), [(2, {"dp": 2}), (6, {"dp": 3, "tp": 2})], ids=str)
def test_invariant_to_the_bit(ranks: int, mesh: dict[str, int], zero: int) -> None:
    """Dropout, a tied head and an uneven deal included."""
    same = {"train_invariant": True, "model_dtype": "float32"}
    check_layout(ranks, mesh, {"optim_zero": zero}, tolerance=0.0, **same)


def test_any_layout_resumes_any_other() -> None:
    """Weights and optimizer state of each are what the one before has left, however it had dealt them."""
    check_resumed(
        (2, {"dp": 2}, {"optim_zero": 3}),
        (3, {"tp": 3}, {}),
        (4, {"dp": 2, "tp": 2}, {"optim_zero": 1}),
        (3, {"dp": 3}, {"optim_zero": 2}),
        (1, {}, {}),
        (4, {"dp": 4}, {"optim_zero": 3}),
    )


def test_any_layout_resumes_any_other_in_16_bits() -> None:
    """Masters too: what a rank has not updated is what the others' masters round to."""
    settings: dict[str, Any] = {"model_dtype": "bfloat16", "tolerance": 1e-2, "optim_eps": 1.0}
    check_resumed((2, {"dp": 2}, {"optim_zero": 1}), (2, {"dp": 2}, {"optim_zero": 3}), (1, {}, {}), **settings)


def test_invariant_runs_resume_to_the_bit() -> None:
    same = {"train_invariant": True, "model_dtype": "float32"}
    check_resumed((2, {"dp": 2}, {"optim_zero": 1}), (6, {"dp": 3, "tp": 2}, {}), (1, {}, {}), tolerance=0.0, **same)
