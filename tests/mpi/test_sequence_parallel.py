"""Sequence-parallel models on real MPI ranks against the plain one-rank model."""

from __future__ import annotations

import pytest

from mpitp.comm import Group
from tests.models.test_sequence_parallel import few_tokens, one_rank, run
from tests.sharded import assert_close

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_equals_one_rank(name: str, world: Group) -> None:
    assert_close(run(world, name, sequence_parallel=True), one_rank(name), 1e-10)


def test_one_token(world: Group) -> None:
    few_tokens(world, "gpt2", 1, sequence_parallel=True)
