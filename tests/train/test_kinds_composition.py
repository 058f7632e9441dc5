"""Encoders and vision transformers along the axes of the mesh: each layout trains as one rank does, in float64.

Losses, gradient norms, held-out loss and accuracy, weights and both moments of every tensor are compared after three
steps with clipping and dropout; the first moments hold every gradient.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from mpitp.comm.mesh import AXES
from tests.train.kinds_case import check, check_resumed

Keys = dict[str, Any]

LAYOUTS: list[tuple[str, Keys, Keys]] = [  # model, [mesh], other keys of the layout
    # replicas, ZeRO, recompute, microbatches
    ("bert", {"dp": 3}, {"optim_zero": 3}),
    ("bert", {"dp": 2, "tp": 2}, {"optim_zero": 2, "train_recompute": "attention"}),
    ("roberta", {"dp": 2, "tp": 2}, {"optim_zero": 3, "train_recompute": "full"}),
    ("distilbert", {"dp": 3}, {"optim_zero": 1, "train_recompute": "every:2"}),
    ("distilbert", {"tp": 2}, {"train_micro_batch_size": 4}),
    ("vit", {"dp": 3}, {"optim_zero": 3}),
    ("dinov2", {"dp": 2, "tp": 2}, {"optim_zero": 2, "train_recompute": "full"}),
    # sequence parallelism
    ("bert", {"tp": 3, "sequence_parallel": True}, {}),
    ("bert", {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb"}, {}),
    ("roberta", {"tp": 2, "sequence_parallel": True}, {"train_micro_batch_size": 4}),
    ("distilbert", {"dp": 2, "tp": 2, "sequence_parallel": True}, {"optim_zero": 3, "train_recompute": "full"}),
    ("vit", {"tp": 3, "sequence_parallel": True}, {"train_micro_batch_size": 2}),
    ("dinov2", {"pp": 2, "tp": 2, "sequence_parallel": True}, {"train_micro_batch_size": 2}),
    ("t5", {"tp": 3, "sequence_parallel": True}, {"train_micro_batch_size": 2}),
    ("bart", {"dp": 2, "tp": 2, "sequence_parallel": True}, {"optim_zero": 3, "train_recompute": "full"}),
    # sequences over ranks
    ("bert", {"cp": 3}, {}),
    ("bert", {"pp": 2, "cp": 2, "cp_form": "heads"}, {"train_micro_batch_size": 2}),
    ("roberta", {"cp": 2, "tp": 2, "sequence_parallel": True}, {"train_micro_batch_size": 4}),
    ("distilbert", {"dp": 2, "cp": 2}, {"optim_zero": 3, "train_recompute": "full"}),
    ("vit", {"cp": 3, "cp_form": "heads"}, {"train_micro_batch_size": 2}),
    ("vit", {"cp": 2, "tp": 2, "sequence_parallel": True}, {"train_micro_batch_size": 2}),
    ("dinov2", {"cp": 3}, {"train_micro_batch_size": 2}),
    ("dinov2", {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True}, {"train_micro_batch_size": 2}),
    ("t5", {"cp": 3}, {"train_micro_batch_size": 2}),
    ("t5", {"cp": 2, "tp": 2, "sequence_parallel": True}, {"train_micro_batch_size": 2, "train_recompute": "full"}),
    ("t5", {"cp": 2, "cp_form": "heads", "dp": 2}, {"optim_zero": 3}),
    ("bart", {"pp": 2, "cp": 2}, {"train_micro_batch_size": 2}),
    ("bart", {"pp": 2, "cp": 2, "tp": 2, "cp_form": "heads", "schedule": "zb"}, {}),
    # ranks of unequal weight
    ("bert", {"tp": 3, "shares": [1, 0, 2.5], "sequence_parallel": True}, {}),
    ("t5", {"pp": 2, "tp": 2, "shares": {"tp": [2, 1], "pp": [1, 2]}, "sequence_parallel": True}, {}),
    # stages
    ("bert", {"pp": 2}, {}),
    ("bert", {"pp": 2, "schedule": "interleaved", "tp": 2}, {}),
    ("bert", {"pp": 3, "schedule": "zb"}, {"train_recompute": "full"}),
    ("roberta", {"pp": 2, "schedule": "gpipe", "dp": 2}, {"optim_zero": 3}),
    ("distilbert", {"pp": 2, "schedule": "zb", "dp": 2}, {"optim_zero": 1}),
    ("vit", {"pp": 2, "schedule": "interleaved", "dp": 2}, {}),
    ("vit", {"pp": 4, "schedule": "zb"}, {}),
    ("dinov2", {"pp": 2, "tp": 2}, {}),
    ("t5", {"pp": 2}, {}),
    ("t5", {"pp": 3, "schedule": "zb"}, {"train_recompute": "full"}),
    ("t5", {"pp": 2, "schedule": "interleaved", "dp": 2}, {"optim_zero": 2}),
    ("bart", {"pp": 4, "schedule": "gpipe"}, {}),
    ("bart", {"pp": 2, "dp": 2}, {"optim_zero": 3}),
    ("bart", {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "interleaved"}, {}),
    ("bart", {"pp": 2, "stages": [5, 0]}, {}),
]


def name_of(layout: tuple[str, Keys, Keys]) -> str:
    model, mesh, others = layout
    axes = " x ".join(f"{axis}{size}" for axis, size in mesh.items() if axis in AXES)
    extra = [str(value) for key, value in mesh.items() if key in ("schedule", "cp_form")]
    words = [model, axes, "sp" * ("sequence_parallel" in mesh), *extra]
    return ", ".join(word for word in (*words, *(f"{k.partition('_')[2]} {v}" for k, v in others.items())) if word)


@pytest.mark.parametrize(("model", "mesh", "layout"), LAYOUTS, ids=map(name_of, LAYOUTS))
def test_equals_one_rank(model: str, mesh: Keys, layout: Keys) -> None:
    check(model, prod(size for axis, size in mesh.items() if axis in AXES), mesh, layout)


@pytest.mark.parametrize(
    ("model", "mesh"), [("bert", {"pp": 2, "tp": 2}), ("vit", {"pp": 2, "dp": 2}), ("t5", {"pp": 4})]
)
def test_invariant_mode_is_equal_to_the_bit(model: str, mesh: Keys) -> None:
    check(model, 4, mesh, tolerance=0, train_invariant=True)


@pytest.mark.parametrize("model", ["bert", "vit", "t5"])
def test_every_axis_has_16_bits(model: str) -> None:
    """Loss, masters and moments of a step are those of one rank, but for rounding to 16 bits on the way."""
    mesh, once = {"pp": 2, "tp": 2, "sequence_parallel": True}, {"train_steps": 1, "checkpoint_every": 1}
    check(model, 4, mesh, {"train_recompute": "full"}, tolerance=8 * 2**-8, model_dtype="bfloat16", **once)


def test_a_run_goes_on_in_other_layouts() -> None:
    check_resumed("bert", (2, {"pp": 2}, {}), (3, {"dp": 3}, {"optim_zero": 3}), (2, {"tp": 2}, {}))


def test_a_run_on_pairs_goes_on_in_other_layouts() -> None:
    shards = {"pp": 2, "tp": 2, "sequence_parallel": True}
    check_resumed("t5", (3, {"pp": 3}, {}), (2, {"dp": 2}, {"optim_zero": 3}), (4, shards, {}))
