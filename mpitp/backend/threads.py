"""How many threads the BLAS of one rank should use. Imports no NumPy: the variables must be set before NumPy loads.

OpenBLAS takes every core by default, so N ranks on a node would run N x cores threads, which is far slower than one
thread a core.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def affinity_cores() -> frozenset[int]:
    """The cores that this process may run on (as a launcher or a container has set them)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def threads_per_rank(cores: int, local_ranks: int) -> int:
    """Threads for each of `local_ranks` ranks that share `cores`; at least one."""
    return max(1, cores // max(1, local_ranks))


def set_thread_environment(environ: MutableMapping[str, str], local_ranks: int) -> int | None:
    """Set the BLAS libraries' thread variables, unless the user has set any of them; the number set, or None.

    `local_ranks`: ranks on this node that share this process's cores.
    """
    if any(environ.get(name) for name in THREAD_VARIABLES):
        return None
    threads = threads_per_rank(len(affinity_cores()), local_ranks)
    for name in THREAD_VARIABLES:
        environ[name] = str(threads)
    return threads


def fair_share(masks: Sequence[frozenset[int]], rank: int) -> int:
    """Threads for a rank when the ranks of its node have these affinity masks: cores in several masks are shared."""
    share = sum(1 / sum(core in mask for mask in masks) for core in masks[rank])
    return max(1, int(share + 1e-9))


def limit_blas_threads(threads: int) -> AbstractContextManager[Any]:
    """Let the BLAS libraries that are loaded by now use `threads`: until the end of a `with` block, or for good."""
    from threadpoolctl import threadpool_limits

    limits = threadpool_limits(limits=threads, user_api="blas")
    blas_threads.cache_clear()
    undo = ExitStack()
    undo.callback(blas_threads.cache_clear)
    undo.callback(limits.restore_original_limits)
    return undo


@cache
def blas_threads() -> int:
    """The most threads of a BLAS library loaded by now, 1 without one; looked up once, and again after a new limit."""
    from threadpoolctl import threadpool_info

    return max((found["num_threads"] for found in threadpool_info() if found["user_api"] == "blas"), default=1)


@cache
def blas_kernels() -> str:
    """For which processors the kernels are that the BLAS library chose: "Haswell", "SkylakeX"; "": it doesn't say."""
    from threadpoolctl import threadpool_info

    found = (pool.get("architecture") for pool in threadpool_info() if pool["user_api"] == "blas")
    return next((name for name in found if name), "")
