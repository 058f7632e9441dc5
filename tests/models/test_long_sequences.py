"""Memory of a pass grows with the sequence, not with its square."""

from __future__ import annotations

import tracemalloc

import numpy as np

from mpitp.comm import SerialGroup
from mpitp.layers.site import make_site
from mpitp.models import Batch, config_from_hf, new_model

TINY = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


def peak_bytes(tokens: int) -> int:
    """Of a forward and backward pass."""
    config = config_from_hf({**TINY, "num_attention_heads": 1, "max_position_embeddings": 4096})
    model = new_model(config, make_site(SerialGroup()), seed=1)
    ids = np.random.default_rng(1).integers(0, 16, (1, tokens + 1))
    tracemalloc.start()
    _, ctx = model.loss_forward(Batch.of_rows(ids[:, :-1], ids[:, 1:]))
    model.loss_backward(ctx, 1.0 / tokens)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_is_linear_in_the_sequence() -> None:
    short, long = peak_bytes(2048), peak_bytes(4096)
    assert long < 2.2 * short
    assert long < 4096**2 * 4 / 4, "a quarter of the scores' own size"
