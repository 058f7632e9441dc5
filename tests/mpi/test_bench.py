"""The benchmarks on real ranks, whose sums go through the shared memory of their node."""

from __future__ import annotations

import pytest

from mpitp.bench import decode, train
from mpitp.comm import Group
from tests.bench.test_command import DECODE, TRAIN, parsed

pytestmark = pytest.mark.mpi


def test_train_measures_a_step_and_its_sums(world: Group) -> None:
    facts = train.measure(parsed(*TRAIN, "--batch", "16", "--seq", "32"), world)
    told = facts["communication"]
    assert told["bytes_a_rank"] == told["expected_bytes_a_rank"]
    assert bool(facts["overlap"]) == bool(facts["sums_at_once"]) == (world.size > 1)


def test_decode_measures_every_batch(world: Group) -> None:
    facts = decode.measure(parsed(*DECODE, "--batch", "2"), world)
    assert [row["batch"] for row in facts["batches"]] == [1, 2]
