"""Dropout depends on the seed, the step and global indices alone: not on ranks, nor on how the batch is cut."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mpitp.backend.device import CpuDevice
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.attention import AttentionDropout
from mpitp.layers.dropout import Dropout
from mpitp.layers.partition import share_heads
from mpitp.layers.passes import DropoutState, Pass
from mpitp.layers.rows import Rows
from mpitp.models import Batch
from tests.models.model_cases import CONFIGS, Arrays, make_batch, make_model, train
from tests.sharded import assert_close

LLAMA = "llama biases, tied, 5/1, llama3"


def trained(group: Group, name: str, dropout: bool = True) -> Arrays:
    return train(make_model(group, CONFIGS[name]), steps=2, dropout=dropout)


@cache
def one_rank(name: str, dropout: bool = True) -> Arrays:
    return trained(SerialGroup(), name, dropout)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("name", ["gpt2", LLAMA])
def test_training_with_dropout_is_the_same_on_any_number_of_ranks(name: str, ranks: int) -> None:
    for result in run_threads(ranks, trained, name):
        assert_close(result, one_rank(name), 1e-10)
    assert np.abs(one_rank(name)["losses"] - one_rank(name, dropout=False)["losses"]).min() > 1e-3


def dropping(lengths: tuple[int, ...], samples: tuple[int, ...], seed: int = 0, step: int = 0) -> Pass:
    return Pass(Rows.of(lengths, samples=samples), DropoutState(seed, step))


def dropped(layer: Dropout, x: np.ndarray, run: Pass) -> np.ndarray:
    return layer.forward(x, run)[0]


def test_residual_masks_of_a_batch_and_of_its_parts() -> None:
    layer, samples = Dropout(0.4, "blocks.0.residual1"), (5, 0, 9)
    x = np.ones((12, 7))
    whole = dropped(layer, x, dropping((4, 4, 4), samples, 1, 2))
    for i, sample in enumerate(samples):
        part = dropped(layer, x[:4], dropping((4,), (sample,), 1, 2))
        np.testing.assert_array_equal(part, whole[4 * i : 4 * i + 4])
    assert set(np.unique(whole)) == {0.0, 1 / 0.6}
    shorter = dropped(layer, x[:3], dropping((3,), (5,), 1, 2))
    np.testing.assert_array_equal(shorter, whole[:3])


def test_masks_differ_by_seed_step_sample_and_name() -> None:
    seen = set()
    for name in ("a", "b"):
        for seed, step, sample in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
            run = dropping((6,), (sample,), seed, step)
            seen.add(dropped(Dropout(0.5, name), np.ones((6, 8)), run).tobytes())
    assert len(seen) == 8


def test_rate_is_kept_and_the_mean_too() -> None:
    y = dropped(Dropout(0.3, "x"), np.ones((300, 200)), dropping((300,), (0,)))
    assert (y == 0).mean() == pytest.approx(0.3, abs=0.01)
    assert y.mean() == pytest.approx(1.0, abs=0.01)


def test_no_dropout_without_a_state_or_a_rate() -> None:
    x = np.ones((3, 2))
    assert dropped(Dropout(0.5, "x"), x, Pass(Rows.of((3,)))) is x
    run = dropping((3,), (0,))
    assert dropped(Dropout(0.0, "x"), x, run) is x
    off = AttentionDropout(0.0, "x")
    assert off.masks(run, run.rows.runs[0], share_heads(2, 2, 0, 1), x) is None


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_attention_masks_follow_the_global_head(ranks: int) -> None:
    dropout, run = AttentionDropout(0.5, "attention"), dropping((8,), (2,), 0, 3)
    like, rows = np.zeros(1), run.rows.runs[0]
    whole = dropout.masks(run, rows, share_heads(5, 1, 0, 1), like)
    assert whole is not None
    masks = [whole(head, range(8), range(8)) for head in range(5)]
    assert len({mask.tobytes() for mask in masks}) == 5
    for rank in range(ranks):
        own = share_heads(5, 1, rank, ranks)
        part = dropout.masks(run, rows, own, like)
        assert part is not None
        for local, head in enumerate(own.query.span):
            np.testing.assert_array_equal(part(local, range(8), range(8)), masks[head])
            np.testing.assert_array_equal(part(local, range(3, 6), range(2, 6)), masks[head][3:6, 2:6], "a tile")


def test_evaluation_and_generation_do_not_drop() -> None:
    model = make_model(SerialGroup(), CONFIGS["gpt2"])
    batch = make_batch(model.config)
    np.testing.assert_array_equal(model.forward(batch)[0], model.forward(batch)[0])
    with_dropout = make_batch(model.config, dropout=DropoutState(0, 0))
    assert np.abs(model.forward(batch)[0] - model.forward(with_dropout)[0]).max() > 1e-3
    assert isinstance(model.device, CpuDevice) and Batch.of_lists([[1, 2]]).dropout is None
