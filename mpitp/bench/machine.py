"""What the numbers were measured on, and what would spoil them."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np

from mpitp.backend.accelerator import describe_accelerator
from mpitp.backend.threads import affinity_cores, threads_per_rank
from mpitp.comm.group import Group


def machine_facts(group: Group) -> dict[str, Any]:
    """Processor, cores, BLAS and its threads, ranks; the same keys on every rank, rank 0's values."""
    from threadpoolctl import threadpool_info

    blas = [pool for pool in threadpool_info() if pool.get("user_api") == "blas"]
    hosts = group.all_gather_objects(platform.node())
    facts = {
        "processor": _processor(),
        "cores": len(affinity_cores()),
        "ranks": group.size,
        "ranks_on_host": hosts.count(platform.node()),
        "blas": ", ".join(f"{pool['internal_api']} {pool.get('architecture', '')}".strip() for pool in blas),
        "blas_threads": max((pool["num_threads"] for pool in blas), default=1),
        "numpy": np.__version__,
        "accelerator": describe_accelerator(),
    }
    return group.broadcast_object(facts)


def warnings_of(facts: dict[str, Any]) -> list[str]:
    """What makes these numbers worse than they need be."""
    cores, ranks, threads = facts["cores"], facts["ranks_on_host"], facts["blas_threads"]
    if cores < ranks:
        return [f"{ranks} ranks share {cores} cores: they wait for one another, and the times say little"]
    fair = threads_per_rank(cores, ranks)
    if threads > fair:
        return [
            f"BLAS uses {threads} threads a rank where {fair} would have a core each; set OMP_NUM_THREADS={fair} "
            "(or leave it unset)"
        ]
    if threads > 1:
        return [
            f"BLAS uses {threads} threads: matrix products use {threads} cores and all the rest uses one; for figures "
            "of one core set OMP_NUM_THREADS=1"
        ]
    return []


def describe(facts: dict[str, Any]) -> str:
    """One line."""
    threads, ranks = facts["blas_threads"], facts["ranks"]
    return (
        f"{ranks} rank{'s' * (ranks > 1)}, {facts['cores']} cores in the affinity mask, {facts['processor']}; "
        f"NumPy {facts['numpy']}, BLAS {facts['blas']} with {threads} thread{'s' * (threads > 1)}; "
        f"accelerator {facts['accelerator']}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or os.uname().machine
