"""An MPI library that can't be loaded: one short message, the cure first, whoever finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.comm.library import load_failure
from tests.launch.test_launch_faults import MPIEXEC, environment, needs_mpiexec

MODEL = str(Path(__file__).resolve().parents[1] / "parity" / "golden" / "llama-gqa")
IS_MPICH = (Path(sys.executable).parent / "hydra_pmi_proxy").exists()
OTHER = "openmpi" if IS_MPICH else "mpich"


def test_the_cure_comes_first(tmp_path: Path) -> None:
    chosen = {"MPI4PY_MPIABI": "openmpi"}
    assert load_failure("no\nlibmpi.so.40", chosen, tmp_path) == (
        "unset MPI4PY_MPIABI: with MPI4PY_MPIABI=openmpi mpi4py can't load an MPI library (no libmpi.so.40)"
    )
    assert load_failure("no", {"MPI4PY_LIBMPI": "/x"}, tmp_path).startswith("unset MPI4PY_LIBMPI: ")
    assert load_failure("no", {"MPI4PY_MPIABI": ""}, tmp_path).startswith("install an MPI into this environment")
    (tmp_path / "mpiexec").write_text("")
    (tmp_path / "mpiexec").chmod(0o755)
    assert load_failure("no", {}, tmp_path).startswith("install the MPI beside this Python again, it is broken")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment(**environ), capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )


@needs_mpiexec
def test_doctor_says_so() -> None:
    result = run(sys.executable, "-m", "mpitp", "doctor", MPI4PY_MPIABI=OTHER)
    assert result.returncode == 6
    assert "WRONG  mpi " in result.stdout and f"-> unset MPI4PY_MPIABI: with MPI4PY_MPIABI={OTHER}" in result.stdout


@needs_mpiexec
@pytest.mark.parametrize("start", [["mpitp", "launch"], ["mpiexec"]], ids=" ".join)
def test_one_message_from_one_rank(start: list[str]) -> None:
    rank = ["verify", "--model", MODEL]
    if start == ["mpiexec"]:
        words = [str(MPIEXEC), "-n", "3", sys.executable, "-m", "mpitp", *rank]
    else:
        words = [sys.executable, "-m", *start, "-n", "3", "--", *rank]
    result = run(*words, MPI4PY_MPIABI=OTHER)
    assert result.returncode == 6
    assert result.stderr.count("Error:") == 1, result.stderr
    assert f"LaunchError: unset MPI4PY_MPIABI: with MPI4PY_MPIABI={OTHER}" in result.stderr
    assert "helper" not in result.stderr  # which ends with a job that is aborted


@needs_mpiexec
@pytest.mark.parametrize("verb", [["doctor"], ["verify", "--model", MODEL]], ids=lambda words: words[0])
@pytest.mark.parametrize("broken", [0, 1])
def test_one_rank_alone_cannot_load_it(verb: list[str], broken: int) -> None:
    """The others wait for it in MPI_Init; MPICH's launcher doesn't notice one that merely leaves."""
    program = [sys.executable, "-m", "mpitp", *verb]
    first, second = (
        ["-n", "1", *(["env", f"MPI4PY_MPIABI={OTHER}"] if rank == broken else []), *program] for rank in (0, 1)
    )
    result = run(str(MPIEXEC), *first, ":", *second)
    assert result.returncode == 6
    assert (result.stdout + result.stderr).count("unset MPI4PY_MPIABI") == 1, result.stdout + result.stderr
