"""From what all ranks told to a list of facts, each right or wrong: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpitp.backend.threads import fair_share
from mpitp.comm.environment import LaunchClaim
from mpitp.comm.shm_room import MPICH_BYTES_A_RANK
from mpitp.doctor.probe import RankProbe

SHM_NEEDED_BYTES = 16 * 2**20  # for each rank of a host: MPI's shared buffers between two ranks, with room to spare


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: what it is about, what was found, whether that is as it must be, and what to do if not."""

    name: str
    value: str
    ok: bool = True
    remedy: str = ""


def diagnose(
    probes: Sequence[RankProbe],
    claims: Sequence[LaunchClaim],
    sums: Sequence[Mapping[str, bool]],
    launch_failure: str = "",
) -> list[Fact]:
    """All facts, from every rank's probe, launcher's claim and checked sums, in rank order."""
    first = probes[0]
    return [
        *_version_facts(probes),
        Fact(
            "blas", f"{', '.join(first.blas) or 'unknown'}; threads a rank: {_spread(p.blas_threads for p in probes)}"
        ),
        _accelerator_fact(probes),
        Fact("cores", f"{_spread(len(p.cores) for p in probes)} in the affinity mask of a rank"),
        _mpi_fact(probes, launch_failure),
        _launcher_fact(probes, claims, launch_failure),
        _layout_fact(probes),
        _oversubscription_fact(probes),
        Fact("cuda-aware", f"{'yes' if first.device_aware.aware else 'no'}: {first.device_aware.how}"),
        _gpu_fact(probes),
        _shm_fact(probes, launch_failure),
        _node_sums_fact(probes),
        sums_fact("all-reduce", sums),
    ]


def _version_facts(probes: Sequence[RankProbe]) -> list[Fact]:
    facts = []
    for index, (name, value) in enumerate(probes[0].versions):
        found = {probe.versions[index][1] for probe in probes}
        shown = f"{value} ({probes[0].executable})" if name == "python" else value
        remedy = "the ranks differ; start all of them from one environment"
        facts.append(Fact(name, shown if len(found) == 1 else ", ".join(sorted(found)), len(found) == 1, remedy))
    return facts


def _accelerator_fact(probes: Sequence[RankProbe]) -> Fact:
    found = sorted({probe.accelerator for probe in probes})
    remedy = "the ranks differ, so none uses it; start all of them from one environment"
    return Fact("accelerator", " | ".join(found), len(found) == 1, remedy)


def _mpi_fact(probes: Sequence[RankProbe], launch_failure: str) -> Fact:
    libraries = sorted({probe.mpi for probe in probes})
    value = "; ".join(f"{library}, MPI standard {standard}" for library, standard, _ in libraries if standard)
    if remedy := _mpi_remedy(probes):
        return Fact("mpi", value or "the MPI library can't be loaded", False, remedy)
    if not value:
        needed = bool(launch_failure)
        return Fact("mpi", "no MPI library: one rank only", not needed, 'pip install "mpitp[mpich]", or load a module')
    return Fact(
        "mpi", value, len(libraries) == 1, "the ranks use different libraries; load one environment on all hosts"
    )


def _mpi_remedy(probes: Sequence[RankProbe]) -> str:
    """What to do where a rank can't load the MPI library that it should have; "" where all can."""
    return next((remedy for _, _, remedy in (probe.mpi for probe in probes) if remedy), "")


def _launcher_fact(probes: Sequence[RankProbe], claims: Sequence[LaunchClaim], launch_failure: str) -> Fact:
    claim = claims[0]
    value = f"{claim.launcher}, {claim.variable}={claim.size}" if claim.variable else "none"
    if launch_failure:
        return Fact("launcher", value, False, "" if launch_failure == _mpi_remedy(probes) else launch_failure)
    wrong = [r for r, c in enumerate(claims) if c.variable and c.variable != "PMIX_RANK" and c.size != len(claims)]
    wrong += [r for r, c in enumerate(claims) if c.variable and c.rank != r]
    remedy = f"launcher and MPI disagree on size or rank (rank {min(wrong)} of MPI's {len(claims)})" if wrong else ""
    return Fact("launcher", value, not wrong, remedy)


def _layout_fact(probes: Sequence[RankProbe]) -> Fact:
    hosts = Counter(probe.host for probe in probes)
    listed = ", ".join(f"{host}: {count}" for host, count in list(hosts.items())[:4])
    more = f", and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    return Fact("ranks", f"{len(probes)} on {len(hosts)} host(s) ({listed}{more})")


def _oversubscription_fact(probes: Sequence[RankProbe]) -> Fact:
    """Ranks and BLAS threads against cores, on the worst host."""
    worst = max(
        (_load(probe.host, probes) for probe in probes), key=lambda load: (load[0] / load[2], load[1] / load[2])
    )
    ranks, threads, cores = worst
    value = f"{ranks} rank(s), {threads} BLAS thread(s) on {cores} core(s)"
    if ranks > cores:
        return Fact("load", value, False, "more ranks than cores: each collective waits for the scheduler; use fewer")
    remedy = "more BLAS threads than cores; unset OMP_NUM_THREADS and its like, or set them lower"
    return Fact("load", value, threads <= cores, remedy)


def _load(host: str, probes: Sequence[RankProbe]) -> tuple[int, int, int]:
    """Ranks, BLAS threads and cores of one host. Threads of a rank beyond its fair share of its mask count as well."""
    here = [probe for probe in probes if probe.host == host]
    cores = len(frozenset().union(*(probe.cores for probe in here)))
    masks = [probe.cores for probe in here]
    shares = [fair_share(masks, i) for i in range(len(here))]
    within_share = all(probe.blas_threads <= share for probe, share in zip(here, shares, strict=True))
    threads = sum(probe.blas_threads for probe in here)
    return len(here), threads if within_share else max(threads, cores + 1), cores


def _gpu_fact(probes: Sequence[RankProbe]) -> Fact:
    found = {probe.gpu for probe in probes}
    value = " | ".join(sorted(found))
    if probes[0].num_gpus:
        ranks = max(Counter(probe.host for probe in probes).values())
        value += f"; at most {-(-ranks // probes[0].num_gpus)} rank(s) a GPU"
    return Fact("gpu", value, len(found) == 1, "the hosts differ in CuPy or GPUs")


def _shm_fact(probes: Sequence[RankProbe], launch_failure: str) -> Fact:
    sized = [(p.shm_free_bytes, p.host) for p in probes if p.shm_free_bytes is not None]
    if not sized:
        return Fact("/dev/shm", "none on this system")
    free, host = min(sized)
    most = max(Counter(probe.host for probe in probes).values())
    needed = SHM_NEEDED_BYTES * most if most > 1 else _shm_for_two(probes[0])
    remedy = (
        f"MPI between ranks of a host needs about {needed / 2**20:.0f} MiB; containers: --shm-size=1g or --ipc=host"
    )
    is_enough = free >= needed and (most > 1 or "/dev/shm" not in launch_failure)
    return Fact("/dev/shm", f"{free / 2**20:,.0f} MiB free to write on {host}", is_enough, remedy)


def _shm_for_two(alone: RankProbe) -> int:
    """The least with which two ranks would start where one now runs alone; Open MPI goes other ways."""
    return 2 * MPICH_BYTES_A_RANK if alone.mpi[0].startswith("MPICH") else 0


def _node_sums_fact(probes: Sequence[RankProbe]) -> Fact:
    """How ranks of one host sum: see `comm/shared_memory.py`."""
    machines = sorted({probe.machine for probe in probes})
    if all(probe.orders_stores for probe in probes):
        return Fact("node sums", f"through shared memory: {', '.join(machines)} keeps the order of stores")
    return Fact("node sums", f"through the MPI library: {', '.join(machines)} may show stores in another order")


def sums_fact(name: str, sums: Sequence[Mapping[str, bool]]) -> Fact:
    """Whether every rank found every dtype's sum right."""
    wrong = [
        f"{dtype} on rank {rank}" for rank, checked in enumerate(sums) for dtype, right in checked.items() if not right
    ]
    value = f"checked against the known answer over {len(sums)} rank(s): {', '.join(sums[0])}"
    remedy = f"WRONG SUMS: {', '.join(wrong[:6])}; don't compute with this MPI library"
    return Fact(name, value, not wrong, remedy)


def _spread(numbers: Iterable[int]) -> str:
    """One number where all are equal, else the range."""
    values = sorted(set(numbers))
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
