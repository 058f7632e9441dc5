from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mpitp.comm import run_threads
from mpitp.comm.device_aware import DeviceAwareness
from mpitp.comm.environment import NO_LAUNCHER, LaunchClaim
from mpitp.comm.group import Group
from mpitp.comm.threads import ThreadGroup
from mpitp.doctor.diagnosis import Fact, diagnose
from mpitp.doctor.probe import RankProbe, probe_rank
from mpitp.doctor.sums import DTYPES, check_sums

PROBE = RankProbe(
    host="a",
    cores=frozenset(range(8)),
    versions=(("mpitp", "1"), ("python", "3.11"), ("numpy", "2"), ("mpi4py", "4")),
    executable="/venv/bin/python",
    blas=("openblas 0.3",),
    blas_threads=4,
    accelerator="off (Numba is not installed)",
    mpi=("MPICH 5", "5.0", ""),
    device_aware=DeviceAwareness(False, "asked"),
    gpu="CuPy is not installed",
    num_gpus=0,
    shm_free_bytes=2**30,
    machine="x86_64",
    orders_stores=True,
)
RIGHT = dict.fromkeys(DTYPES, True)


def claim(rank: int, size: int = 2) -> LaunchClaim:
    return LaunchClaim("mpiexec", size, rank, rank, size, "PMI_SIZE")


def wrong(
    probes: list[RankProbe], claims: list[Any] | None = None, sums: Any = None, failure: str = ""
) -> dict[str, str]:
    """Names and remedies of the wrong facts."""
    facts = diagnose(
        probes, claims or [claim(r, len(probes)) for r in range(len(probes))], sums or [RIGHT] * 2, failure
    )
    assert len({fact.name for fact in facts}) == len(facts)
    return {fact.name: fact.remedy for fact in facts if not fact.ok}


def test_all_is_well() -> None:
    assert wrong([PROBE, PROBE]) == {}
    assert wrong([PROBE], [NO_LAUNCHER]) == {}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"versions": (("mpitp", "1"), ("python", "3.12"), ("numpy", "2"), ("mpi4py", "4"))}, "python"),
        ({"versions": (("mpitp", "1"), ("python", "3.11"), ("numpy", "1.9"), ("mpi4py", "4"))}, "numpy"),
        ({"mpi": ("Open MPI 5", "3.1", "")}, "mpi"),
        ({"blas_threads": 8}, "load"),
        ({"accelerator": "Numba 0.68.1"}, "accelerator"),
        ({"gpu": "CuPy 14"}, "gpu"),
        ({"shm_free_bytes": 2**20}, "/dev/shm"),
    ],
)
def test_one_rank_differs(change: dict[str, Any], name: str) -> None:
    assert list(wrong([PROBE, replace(PROBE, **change)])) == [name]


@pytest.mark.parametrize(("library", "is_enough"), [("MPICH 5", False), ("Open MPI 5", True), ("none", True)])
def test_room_that_two_ranks_would_not_have_is_told_to_one(library: str, is_enough: bool) -> None:
    alone = replace(PROBE, mpi=(library, "5.0" if library != "none" else "", ""), shm_free_bytes=2**20)
    assert ("/dev/shm" not in wrong([alone], [NO_LAUNCHER])) == is_enough


@pytest.mark.parametrize(("machine", "orders", "way"), [("x86_64", True, "shared memory"), ("aarch64", False, "MPI")])
def test_how_ranks_of_a_host_sum(machine: str, orders: bool, way: str) -> None:
    probe = replace(PROBE, machine=machine, orders_stores=orders)
    (fact,) = [f for f in diagnose([probe] * 2, [claim(0), claim(1)], [RIGHT] * 2) if f.name == "node sums"]
    assert fact.ok and f"through {'the ' * (not orders)}{way}" in fact.value and machine in fact.value


def test_more_ranks_than_cores() -> None:
    few = replace(PROBE, cores=frozenset({0}), blas_threads=1)
    assert "more ranks than cores" in wrong([few, few])["load"]


def test_own_cores_are_not_shared() -> None:
    halves = [replace(PROBE, cores=frozenset(range(4))), replace(PROBE, cores=frozenset(range(4, 8)))]
    assert wrong(halves) == {}
    uneven = [replace(PROBE, cores=frozenset({0})), replace(PROBE, cores=frozenset(range(1, 8)))]
    assert list(wrong(uneven)) == ["load"]


def test_two_hosts_have_their_own_cores() -> None:
    assert wrong([PROBE, replace(PROBE, host="b")] * 2, sums=[RIGHT] * 4) == {}


@pytest.mark.parametrize("claims", [[claim(0, 3), claim(1, 3)], [claim(1), claim(0)]])
def test_launcher_and_mpi_disagree(claims: list[LaunchClaim]) -> None:
    assert list(wrong([PROBE, PROBE], claims)) == ["launcher"]


def test_launch_failure_is_shown() -> None:
    assert wrong([PROBE], [claim(0)], failure="singletons")["launcher"] == "singletons"


def test_no_mpi_is_right_for_one_rank_alone() -> None:
    without = replace(PROBE, mpi=("none", "", ""))
    assert wrong([without], [NO_LAUNCHER]) == {}
    assert set(wrong([without], [claim(0)], failure="no library")) == {"mpi", "launcher"}


def test_an_mpi_that_cannot_be_loaded_is_wrong_for_one_rank_too() -> None:
    remedy = "unset MPI4PY_MPIABI: with MPI4PY_MPIABI=openmpi mpi4py can't load an MPI library (no libmpi.so.40)"
    broken = replace(PROBE, mpi=("none", "", remedy))
    assert wrong([broken], [NO_LAUNCHER]) == {"mpi": remedy}
    assert wrong([broken], [claim(0)], failure=remedy) == {"mpi": remedy, "launcher": ""}


def test_wrong_sum_names_dtype_and_rank() -> None:
    remedy = wrong([PROBE, PROBE], sums=[RIGHT, {**RIGHT, "float16": False}])["all-reduce"]
    assert "float16 on rank 1" in remedy


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_sums_of_a_right_group(size: int, xp: Any) -> None:
    assert run_threads(size, check_sums, xp) == [RIGHT] * size


def test_sums_of_a_broken_group(monkeypatch: pytest.MonkeyPatch, xp: Any) -> None:
    monkeypatch.setattr(ThreadGroup, "all_reduce", lambda self, x, op="sum", out=None: x)
    for checked in run_threads(2, check_sums, xp):
        assert not any(checked.values())


def test_probe_of_this_process() -> None:
    probe = probe_rank()
    assert [name for name, _ in probe.versions] == ["mpitp", "python", "numpy", "mpi4py"]
    assert probe.cores and probe.blas_threads >= 1


def test_facts_are_the_same_on_every_rank() -> None:
    from mpitp.doctor.command import _as_json, _gather_facts

    def facts(group: Group) -> list[Fact]:
        return _gather_facts(group, "")

    found = run_threads(3, facts)
    assert found[0] == found[1] == found[2]
    told = json.loads(_as_json(found[0]))
    assert {"name", "value", "ok", "remedy"} == set(told["facts"][0])
