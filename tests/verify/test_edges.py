"""The ids at the edges of every shard of the vocabulary are in the batch, so a fault that shows only there is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.planted_bugs import in_model
from mpitp.models import CausalLM
from mpitp.verify.batches import random_batch, with_edges
from tests.command_on_threads import command_on_threads
from tests.models.model_cases import CONFIGS

MODEL = str(Path(__file__).resolve().parent.parent / "parity" / "golden" / "llama-gqa")


@pytest.mark.parametrize(("ranks", "blocks"), [(1, 0), (2, 0), (5, 0), (2, 6), (7, 0)])
def test_edges_are_inputs_and_targets(ranks: int, blocks: int) -> None:
    config = CONFIGS["gpt2"]
    batch = random_batch(config, batch=2, seq=4, seed=0)
    whole = with_edges(batch, config, blocks, ranks)
    pieces = np.array_split(np.arange(config.vocab_size), blocks or ranks)
    edges = {int(edge) for piece in pieces for edge in (piece[0], piece[-1])}
    assert whole.targets is not None
    assert set(whole.tokens[8:].tolist()) == set(whole.targets[8:].tolist()) == edges
    np.testing.assert_array_equal(whole.tokens[:8], batch.tokens)
    assert sum(run.length for run in whole.rows.runs) == len(whole.tokens) == len(whole.targets)
    assert max(run.length for run in whole.rows.runs) <= config.max_positions


def lose_the_last_row(model: CausalLM) -> None:
    """Ranks above the first look no token up in the last row of their table."""
    layer: Any = model.layers["embedding"]
    if model.site.tp.rank:
        forward = layer.forward

        def without_last(ids: Any, run: Any) -> Any:
            last = layer.vocab.span[-1]
            saved = layer.weight.data[-1].copy()
            if (ids == last).any():
                layer.weight.data[-1] = 0
            result = forward(ids, run)
            layer.weight.data[-1] = saved
            return result

        layer.forward = without_last


def test_a_fault_at_the_edge_of_a_shard_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with in_model(lose_the_last_row)():
        assert command_on_threads(2, "verify", "--model", MODEL, "--failures-only", "--seed", "3") == [5, 5]
    assert "first in forward order: embedding" in capsys.readouterr().out
