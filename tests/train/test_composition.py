"""All axes at once: layouts of up to 16 thread ranks, each trained as one rank is, in float64 (see `layouts.py`).

Losses, gradient norms, weights and both moments of every tensor are compared after three steps with clipping; the first
moments hold every gradient. Sizes are uneven: 6, 9 or 5 heads, 37 FFN columns, 53 or 257 ids, 8 tokens a sequence, the
last microbatch smaller where the batch doesn't divide.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from mpitp.comm.mesh import AXES
from tests.train.layouts import check_layout

Keys = dict[str, Any]

SP = {"sequence_parallel": True}
LLAMA, TIED_LLAMA, QWEN, UNTIED = "llama 9/3", "llama biases, tied, 5/1, llama3", "qwen2 6/2, tied", "gpt2 untied"
COMMON = {"train_global_batch_size": 4, "train_eval_every": 0, "data_valid": None, "data_valid_sequences": None}
ODD = {"data_seq_len": 7}  # tokens that neither 2 x cp pieces nor the ranks of tp divide
DEEP = {"model_n_layer": 4, "train_global_batch_size": 8}

# [mesh], other keys of the layout, what both runs have (no model: GPT-2, tied)
LAYOUTS: list[tuple[Keys, Keys, Keys]] = [
    # tp, dp
    ({"tp": 2, **SP}, {}, {}),
    ({"tp": 3, **SP}, {"train_recompute": "full"}, {"model": LLAMA}),
    ({"tp": 5, **SP}, {}, {"model": TIED_LLAMA}),
    ({"dp": 2, "tp": 2, **SP}, {}, {}),
    ({"dp": 3, "tp": 2, **SP}, {}, {"model": LLAMA}),
    ({"dp": 5, "tp": 2}, {}, {"model": UNTIED}),
    # ZeRO
    ({"dp": 2, "tp": 3, **SP}, {"optim_zero": 1}, {"model": UNTIED}),
    ({"dp": 3, "tp": 2, **SP}, {"optim_zero": 2}, {"model": TIED_LLAMA}),
    ({"dp": 2, "tp": 2, **SP}, {"optim_zero": 3}, {}),
    ({"dp": 4, "tp": 2}, {"optim_zero": 3, "train_recompute": "every:2"}, {"model": LLAMA}),
    ({"dp": 2, "tp": 2}, {"optim_zero": 1}, {"model": QWEN}),
    ({"dp": 4, "tp": 4, **SP}, {"optim_zero": 2}, {"model": LLAMA}),
    ({"dp": 5}, {"optim_zero": 3, "train_recompute": "full"}, {"model": TIED_LLAMA}),
    # cp
    ({"cp": 2, "tp": 2, **SP}, {}, ODD),
    ({"cp": 3, "tp": 2, **SP, "cp_form": "heads"}, {}, {"model": LLAMA, **ODD}),
    ({"cp": 3, "tp": 4, **SP}, {}, {"model": TIED_LLAMA, **ODD}),
    ({"dp": 2, "cp": 2}, {"optim_zero": 1}, {"model": TIED_LLAMA, **ODD}),
    ({"dp": 2, "cp": 2, "tp": 2, **SP}, {}, {"model": LLAMA, **ODD}),
    ({"dp": 2, "cp": 2, "tp": 2}, {"optim_zero": 2}, ODD),
    ({"dp": 2, "cp": 2, "tp": 3, **SP, "cp_form": "heads"}, {"optim_zero": 3}, {"model": UNTIED, **ODD}),
    ({"dp": 3, "cp": 2}, {"optim_zero": 3, "train_recompute": "attention"}, {"model": LLAMA, **ODD}),
    ({"dp": 2, "cp": 3, "cp_form": "heads"}, {"train_recompute": "full"}, ODD),
    ({"dp": 2, "cp": 4, "tp": 2, **SP}, {"optim_zero": 2}, {"model": LLAMA, "data_seq_len": 9}),
    # pp
    ({"pp": 2, "tp": 2, **SP}, {}, {}),
    ({"pp": 2, "tp": 3, **SP, "schedule": "zb"}, {}, {"model": LLAMA}),
    ({"pp": 2, "tp": 4, "schedule": "gpipe", **SP}, {"train_recompute": "full"}, {"model": TIED_LLAMA}),
    ({"pp": 2, "dp": 2}, {"optim_zero": 2}, {"model": TIED_LLAMA}),
    ({"pp": 2, "dp": 2, "tp": 2, **SP}, {}, {}),
    ({"pp": 2, "dp": 2, "tp": 2, **SP, "schedule": "zb"}, {"optim_zero": 1}, {"model": LLAMA}),
    ({"pp": 2, "dp": 2, "tp": 3}, {"optim_zero": 2, "train_recompute": "attention"}, {"model": UNTIED}),
    ({"pp": 4, "dp": 2, "tp": 2, **SP}, {"optim_zero": 1}, DEEP),
    ({"pp": 2, "dp": 2, "schedule": "interleaved", "tp": 2, **SP}, {}, DEEP),
    ({"pp": 3, "tp": 2, **SP, "stages": [2, 1, 1], "schedule": "zb"}, {"train_recompute": "every:2"}, DEEP),
    ({"pp": 2, "dp": 2, "tp": 4, **SP, "schedule": "gpipe"}, {"optim_zero": 2}, {"model": QWEN}),
    ({"pp": 2, "dp": 2}, {"optim_zero": 3}, {"model": TIED_LLAMA}),
    ({"pp": 2, "dp": 2, "tp": 2, **SP, "schedule": "gpipe"}, {"optim_zero": 3, "train_recompute": "full"}, {}),
    ({"pp": 2, "dp": 2, "schedule": "interleaved"}, {"optim_zero": 3}, DEEP),
    # pp and cp
    ({"pp": 2, "cp": 2}, {}, ODD),
    ({"pp": 2, "cp": 2, "schedule": "zb", "cp_form": "heads"}, {}, {"model": TIED_LLAMA, **ODD}),
    ({"pp": 2, "cp": 2, "tp": 2, **SP}, {}, {"model": LLAMA, **ODD}),
    ({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, {"optim_zero": 3}, {"model": LLAMA, **ODD}),
    ({"pp": 2, "cp": 3, "tp": 2, "schedule": "gpipe"}, {"train_recompute": "full"}, {"model": UNTIED, **ODD}),
    ({"pp": 2, "dp": 2, "cp": 2}, {"optim_zero": 2}, {"model": TIED_LLAMA, **ODD}),
    ({"pp": 2, "dp": 2, "cp": 2, "tp": 2, **SP}, {}, ODD),
    ({"pp": 2, "dp": 2, "cp": 2, "tp": 2, **SP, "schedule": "zb"}, {"optim_zero": 1}, {"model": LLAMA, **ODD}),
    (
        {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "cp_form": "heads"},
        {"optim_zero": 2, "train_recompute": "full"},
        {"model": TIED_LLAMA, **ODD},
    ),
]


def name_of(layout: tuple[Keys, Keys, Keys]) -> str:
    mesh, others, same = layout
    axes = " x ".join(f"{axis}{size}" for axis, size in mesh.items() if axis in AXES)
    extra = [str(value) for key, value in mesh.items() if key in ("schedule", "cp_form", "stages")]
    words = [axes, "sp" * ("sequence_parallel" in mesh), *extra]
    words += [f"{key.partition('_')[2]} {value}" for key, value in others.items()]
    return ", ".join(word for word in (*words, *(str(value) for value in same.values())) if word)


@pytest.mark.parametrize(("mesh", "layout", "same"), LAYOUTS, ids=map(name_of, LAYOUTS))
def test_equals_one_rank(mesh: Keys, layout: Keys, same: Keys) -> None:
    ranks = prod(size for axis, size in mesh.items() if axis in AXES)
    check_layout(ranks, mesh, layout, **{**COMMON, **same})
