"""The closed form of a step's traffic against the collectives that a step really calls."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from mpitp.bench.profile import Calls, Stopwatch, watch_group
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of
from mpitp.bench.traffic import step_traffic
from mpitp.bench.train import batch_to_time, step_of
from mpitp.comm import Group, run_threads
from mpitp.layers.site import make_site
from mpitp.models.config import DecoderConfig
from mpitp.optim.grad_norm import GradNorm, norm_slots

SEQUENCES, LENGTH = 2, 5
CASES = [("gpt2", 6, 6), ("llama", 6, 6), ("llama", 6, 2), ("llama", 5, 1)]


def config(model_type: str, heads: int, kv_heads: int) -> DecoderConfig:
    sizes = argparse.Namespace(layers=2, hidden=heads * 4, heads=heads, kv_heads=kv_heads, head_dim=4, ffn=7, vocab=11)
    return config_of(sizes, model_type, max_positions=LENGTH)


def counted(group: Group, cfg: DecoderConfig, dtype: str, blocks: int) -> tuple[Calls, int]:
    model = random_model(cfg, make_site(group, dtype=dtype, invariant_blocks=blocks))
    step = step_of(model, batch_to_time(cfg, SEQUENCES, LENGTH))
    with watch_group(group, Stopwatch()) as calls:
        step()
    assert "all_reduce" not in vars(group), "the group is as it was"
    return calls, GradNorm(model.named_params(), group).num_slots


@pytest.mark.parametrize("model_type, heads, kv_heads", CASES)
@pytest.mark.parametrize("ranks, blocks", [(2, 0), (3, 0), (4, 0), (2, 5), (3, 5)])
@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("float64", 8)])
def test_bytes_and_calls_are_those_of_the_closed_form(
    model_type: str, heads: int, kv_heads: int, ranks: int, blocks: int, dtype: str, itemsize: int
) -> None:
    cfg = config(model_type, heads, kv_heads)
    expected = step_traffic(cfg, ranks, SEQUENCES * LENGTH, itemsize, blocks)
    for calls, slots in run_threads(ranks, counted, cfg, dtype, blocks):
        assert slots == norm_slots(cfg, blocks or ranks)
        assert calls.total_bytes == sum(row.total_bytes for row in expected)
        assert len(calls.sizes) == sum(row.calls for row in expected)


def test_four_activations_a_block_travel() -> None:
    cfg = config("gpt2", 6, 6)
    ((calls, _), _) = run_threads(2, counted, cfg, "float32", 0)
    activation = SEQUENCES * LENGTH * cfg.hidden_size * 4
    assert Counter(size for _, size in calls.sizes)[activation] == 4 * cfg.num_layers + 2


def test_nothing_travels_on_one_rank() -> None:
    assert step_traffic(config("gpt2", 6, 6), 1, 10, 4) == []


def test_llama_with_a_shared_kv_head_counts_its_gradients() -> None:
    rows = {row.what: row for row in step_traffic(config("llama", 6, 2), 4, 10, 4)}
    kv = "blocks.*.attention.heads backward"
    assert rows[kv].total_bytes == 2 * 2 * 2 * 10 * 4 * 4  # layers, shared heads, dk and dv, t, d, bytes
    assert kv not in {row.what for row in step_traffic(config("llama", 6, 2), 2, 10, 4)}
