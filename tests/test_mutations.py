"""A test of the tests: with a fault planted, the comparisons with one rank fail at every rank count above one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.comm import run_threads
from tests.layers import test_parallel_equals_dense as layers
from tests.models import test_equals_one_rank as models
from tests.models import test_invariant as invariant
from tests.models.model_cases import whole_run
from tests.planted import FAULTS, VARIABLE
from tests.sharded import assert_close, assert_same_bits

ROOT = Path(__file__).resolve().parents[1]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
RANKS = [2, 3, 4]
PLAIN = [name for name in FAULTS if "in order" not in name]
LLAMA = "llama 9/3"


def compare_models(ranks: int) -> None:
    for result in run_threads(ranks, whole_run, LLAMA):
        assert_close(result, models.one_rank(LLAMA), 1e-10)


def compare_layers(ranks: int, *names: str) -> None:
    for name in names:
        for result in run_threads(ranks, layers.run_layer, name):
            assert_close(result, layers.one_rank(name), layers.TOLERANCE)


def compare_invariant(ranks: int) -> None:
    for result in run_threads(ranks, invariant.invariant_run, LLAMA):
        assert_same_bits(result, invariant.one_rank(LLAMA))


def seen(fault: str, ranks: int) -> bool:
    """Whether the fault can be seen: on 3 ranks, 9 heads in 3 groups divide evenly and every rank's map is rank 0's."""
    return not (fault.startswith("KV heads") and ranks == 3)


@pytest.fixture(autouse=True)
def one_rank_first() -> None:
    """The expected results, before anything is broken."""
    models.one_rank(LLAMA)
    invariant.one_rank(LLAMA)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("fault", PLAIN)
def test_whole_models_turn_red(fault: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if ranks == 2:
        compare_models(ranks)
    FAULTS[fault](monkeypatch)
    if seen(fault, ranks):
        with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
            compare_models(ranks)
    else:
        compare_models(ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["row 7", "column 8", "attention 9/3", "gelu 9", "swiglu 7", "embedding 9", "loss 9"])
def test_every_layer_that_sums_turns_red_without_the_all_reduce(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers.one_rank(name)
    FAULTS["all-reduce returns the local value"](monkeypatch)
    with pytest.raises(AssertionError):
        compare_layers(ranks, name)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_invariant_layout_turns_red(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["sum in order leaves out the other ranks"](monkeypatch)
    with pytest.raises(AssertionError):
        compare_invariant(ranks)


def mpi_tests(ranks: int, fault: str | None) -> subprocess.CompletedProcess[str]:
    """The comparison of one model with one rank in tests/mpi, on processes."""
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_osc": "^ucx"}
    env = {**os.environ, **allow, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PYTHONPATH": str(ROOT)}
    plugin = [] if fault is None else ["-p", "tests.planted"]
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider"]
    select = ["tests/mpi/test_models.py", "-k", f"test_float64_equals_one_rank and {LLAMA.split()[0]} and 9"]
    env[VARIABLE] = fault or ""
    return subprocess.run([*command, *plugin, *select], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@pytest.mark.skipif(not MPIEXEC.exists(), reason="this environment has no mpiexec")
@pytest.mark.parametrize("fault", [None, "all-reduce returns the local value", "head on two ranks"])
def test_processes_turn_red(fault: str | None) -> None:
    if fault is None:
        done = mpi_tests(2, fault)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
        return
    for ranks in (2, 3):
        assert any("AssertionError" in failure_of(ranks, fault) for _ in range(3)), f"on {ranks} ranks"


def failure_of(ranks: int, fault: str) -> str:
    """What a job that must fail says. An mpiexec that is busy may lose the last lines of an aborted job."""
    done = mpi_tests(ranks, fault)
    assert done.returncode != 0, done.stdout + done.stderr
    return done.stderr
