"""How every program begins: choose the device by the node-local rank, then join the other ranks."""

from __future__ import annotations

import os

from mpitp.backend.accelerator import decide_later, offer, use_accelerator
from mpitp.backend.device import Device, make_device
from mpitp.backend.threads import limit_blas_threads
from mpitp.comm.agreement import agree, environment_facts
from mpitp.comm.environment import launch_claim
from mpitp.comm.group import Group
from mpitp.comm.start_world import world_group
from mpitp.error_stream import ErrorStream


def start_job(device: str, *, invariant: bool = False, accelerate: bool = True) -> tuple[Group, Device]:
    """The group of all ranks and this rank's device ("cpu" or "gpu").

    The device comes first: a CUDA-aware MPI binds to the one that is current when it starts. `invariant`: BLAS gets one
    thread on every rank, because the bits of a product may depend on the number of threads. accelerate: see
    `join_ranks`.
    """
    if invariant:
        limit_blas_threads(1)
    claim = launch_claim(os.environ)
    local_rank = claim.rank if claim.local_rank is None else claim.local_rank
    chosen = make_device(device, local_rank)
    return join_ranks(accelerate=accelerate), chosen


def join_ranks(*, accelerate: bool = True) -> Group:
    """The group of all ranks, which run the same versions and use the accelerator alike. accelerate: False leaves what
    a single rank uses to be decided by the caller, who may not need it.
    """
    group = world_group()
    agree(group, environment_facts)
    if accelerate or group.size > 1:
        agree_on_accelerator(group)
    else:
        decide_later()
    return group


def agree_on_accelerator(group: Group) -> None:
    """All ranks use the accelerator, or none does: whether all have it, in one version, is decided here once."""
    offers = group.all_gather_objects(offer())
    use_accelerator(bool(offers[0]) and len(set(offers)) == 1)
    if len(set(offers)) > 1 and group.rank == 0:
        found = ", ".join(sorted(name or "none" for name in set(offers)))
        print(f"mpitp: warning: the ranks differ in their accelerator ({found}); none is used", file=ErrorStream())
