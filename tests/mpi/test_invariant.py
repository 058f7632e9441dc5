"""Invariant mode on real MPI ranks: the bits of the one-rank run, which each rank computes for itself.

The one-rank run takes no part of MPI (`SerialGroup`), so its bits depend on the BLAS alone. `scripts/test` runs this
under MPICH and under Open MPI with one and the same BLAS: both being equal to the same one-rank run, they are equal to
each other.
"""

from __future__ import annotations

import pytest

from mpitp.comm import Group, SerialGroup
from tests.property.layouts import Case, whole_run
from tests.sharded import assert_same_bits
from tests.train.invariant_case import BLOCKS, CONFIGS, on_one_rank, train_and_generate

pytestmark = pytest.mark.mpi

CASES = [  # heads, FFN and vocabulary that nothing divides; the last has blocks of one unit
    Case("gpt2", 1, 4, 5, 1, 3, 0, 17, 29, 2, (5, 1, 7), True, True, 0.3),
    Case("llama", 1, 6, 2, 4, 2, 11, 13, 31, 2, (9, 2), False, False, 0.0),
    Case("llama", 1, 7, 7, 1, 1, 9, 7, 7, 1, (6,), True, True, 0.3),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_training_and_two_texts(name: str, world: Group) -> None:
    assert world.size <= BLOCKS
    steps = 10  # more ranks than cores make each collective slow; the thread ranks take fifty
    assert_same_bits(train_and_generate(world, name, steps), on_one_rank(name, steps))


@pytest.mark.parametrize("case", CASES)
def test_odd_sizes(case: Case, world: Group) -> None:
    assert_same_bits(whole_run(world, case), whole_run(SerialGroup(), case))
