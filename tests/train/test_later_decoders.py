"""Decoders with windows, caps, norms of heads, parallel branches and ALiBi in every kind of layout: as on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.layouts import check_layout

FEW = {"train_steps": 2, "checkpoint_every": 2, "train_global_batch_size": 3}
SP = {"sequence_parallel": True}
LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [  # model, ranks, [mesh], other keys
    ("gemma3", 3, {"tp": 3, **SP}, {}),
    ("gemma3", 4, {"cp": 2, "tp": 2}, {}),
    ("gemma3", 2, {"pp": 2}, {}),
    ("gemma3", 4, {"dp": 2, "tp": 2}, {"optim_zero": 2}),
    ("gemma2", 3, {"cp": 3, "cp_form": "heads"}, {}),
    ("gemma2", 2, {"dp": 2}, {"optim_zero": 3}),
    ("olmo2", 3, {"tp": 3, **SP}, {}),
    ("olmo2", 4, {"dp": 2, "tp": 2, **SP}, {"optim_zero": 2}),
    ("olmo2", 3, {"tp": 3, "shares": [3, 1, 2]}, {}),
    ("olmo2", 4, {"pp": 2, "tp": 2}, {}),
    ("olmo2", 4, {"cp": 2, "tp": 2, "cp_form": "heads"}, {}),
    ("bloom", 6, {"cp": 2, "tp": 3}, {}),
    ("bloom", 4, {"cp": 2, "tp": 2, "cp_form": "heads", **SP}, {}),
    ("bloom", 2, {"pp": 2}, {}),
    ("gpt_neox", 4, {"dp": 2, "tp": 2, **SP}, {}),
    ("stablelm", 5, {"tp": 5, **SP}, {}),
    ("phi3", 2, {"cp": 2}, {}),
    ("opt", 4, {"pp": 2, "tp": 2}, {}),
]


@pytest.mark.parametrize(("model", "ranks", "mesh", "layout"), LAYOUTS, ids=str)
def test_equals_one_rank(model: str, ranks: int, mesh: dict[str, Any], layout: dict[str, Any]) -> None:
    check_layout(ranks, mesh, layout, model=model, **FEW)
