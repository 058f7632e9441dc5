"""`mpitp doctor`: one screen of facts, each marked ok or WRONG."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from typing import TYPE_CHECKING

from mpitp.errors import LaunchError

if TYPE_CHECKING:
    from mpitp.comm.group import Group
    from mpitp.doctor.diagnosis import Fact

_DESCRIPTION = """\
Show what mpitp finds on this machine, each line marked ok or WRONG with what to do about it: Python, NumPy and its BLAS
and threads, the cores of each rank, mpi4py and the MPI library, the launcher, ranks and hosts, whether MPI reads GPU
memory, CuPy and the GPUs, free shared memory, and an all-reduce checked in every dtype in use.

Run it alone, and run it the way your jobs run. The exit code is 6 when anything is WRONG."""

_EPILOG = """\
examples:
  mpitp doctor
  mpitp launch -n 4 -- doctor
  srun -N 2 -n 8 mpitp doctor
  mpirun -n 4 mpitp doctor --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp doctor`."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Probe every rank and print the facts on rank 0; every rank returns 0, or LaunchError's code if one is wrong."""
    from mpitp.comm.abort import end_all_ranks
    from mpitp.comm.environment import launch_claim
    from mpitp.comm.serial import SerialGroup
    from mpitp.comm.start_world import world_group

    claim = launch_claim(os.environ)
    failure = ""
    group: Group
    try:
        group = world_group()
        speaks = group.rank == 0
    except LaunchError as error:  # this process is alone: let rank 0 say so, with all else that it sees
        if claim.rank > 0:
            raise
        group, failure, speaks = SerialGroup(), str(error), True
    facts = _gather_facts(group, failure)
    code = 0 if all(fact.ok for fact in facts) else LaunchError.exit_code
    if speaks:
        print(_as_json(facts) if args.json else _as_text(facts))
        sys.stdout.flush()
    if failure and claim.size > 1:
        end_all_ranks(0, "", code)  # others may wait for this rank in MPI's start
    return code


def _gather_facts(group: Group, failure: str) -> list[Fact]:
    """The facts, equal on all ranks."""
    import numpy as np

    from mpitp.comm.environment import launch_claim
    from mpitp.doctor.diagnosis import diagnose
    from mpitp.doctor.probe import probe_rank
    from mpitp.doctor.sums import check_sums

    probes = group.all_gather_objects(probe_rank())
    claims = group.all_gather_objects(launch_claim(os.environ))
    sums = group.all_gather_objects(check_sums(group, np))
    facts = diagnose(probes, claims, sums, failure)
    if all(probe.num_gpus for probe in probes):
        facts.append(_gpu_sums_fact(group, claims[group.rank].local_rank or 0))
    return facts


def _gpu_sums_fact(group: Group, local_rank: int) -> Fact:
    from mpitp.backend.device import make_device
    from mpitp.doctor.diagnosis import sums_fact
    from mpitp.doctor.sums import check_sums

    device = make_device("gpu", local_rank)
    return sums_fact("gpu all-reduce", group.all_gather_objects(check_sums(group, device.xp)))


def _as_text(facts: list[Fact]) -> str:
    width = max(len(fact.name) for fact in facts)
    indent = " " * (width + 9)
    lines = []
    for fact in facts:
        lines.append(f"{'ok   ' if fact.ok else 'WRONG'}  {fact.name:{width}}  {fact.value}")
        if not fact.ok and fact.remedy:
            lines += textwrap.wrap(f"-> {fact.remedy}", 110, initial_indent=indent, subsequent_indent=indent + "   ")
    wrong = sum(not fact.ok for fact in facts)
    lines.append("all is well" if not wrong else f"{wrong} of {len(facts)} facts are WRONG")
    return "\n".join(lines)


def _as_json(facts: list[Fact]) -> str:
    listed = [
        {"name": fact.name, "value": fact.value, "ok": fact.ok, "remedy": "" if fact.ok else fact.remedy}
        for fact in facts
    ]
    return json.dumps({"ok": all(fact.ok for fact in facts), "facts": listed}, indent=2)
