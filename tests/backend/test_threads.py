from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from mpitp.backend.threads import (
    THREAD_VARIABLES,
    affinity_cores,
    blas_threads,
    fair_share,
    limit_blas_threads,
    set_thread_environment,
    threads_per_rank,
)


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1), (8, 0, 8)])
def test_cores_are_dealt_to_ranks(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads


def test_environment_is_set_when_the_user_set_nothing() -> None:
    environ: dict[str, str] = {}
    assert set_thread_environment(environ, 10_000) == 1
    assert environ == dict.fromkeys(THREAD_VARIABLES, "1")


@pytest.mark.parametrize("name", THREAD_VARIABLES)
def test_user_s_setting_stays(name: str) -> None:
    environ = {name: "3"}
    assert set_thread_environment(environ, 1) is None
    assert environ == {name: "3"}


def test_fair_share_of_masks() -> None:
    all_cores = frozenset(range(8))
    assert [fair_share([all_cores] * 4, rank) for rank in range(4)] == [2] * 4
    disjoint = [frozenset({0, 1}), frozenset({2, 3, 4})]
    assert [fair_share(disjoint, rank) for rank in range(2)] == [2, 3]
    assert fair_share([frozenset({0})] * 3, 1) == 1


def test_affinity() -> None:
    assert affinity_cores() <= frozenset(range(os.cpu_count() or 1))


def test_blas_is_limited() -> None:
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    np.ones((2, 2)) @ np.ones((2, 2))
    before = threads()
    with limit_blas_threads(1):
        assert threads() == [1] * len(before)
        assert blas_threads() == 1
    assert threads() == before
    assert blas_threads() == max(before)


def test_no_numpy_is_imported() -> None:
    code = "import sys, mpitp.backend.threads, mpitp.backend.malloc; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
