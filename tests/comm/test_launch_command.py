from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpitp import cli
from mpitp.comm import launch_command
from mpitp.comm.launch_command import Launcher, bind_options, find_launcher, launcher_variables, rank_command
from mpitp.errors import LaunchError, UsageError

MPIEXEC = Path(sys.executable).parent / "mpiexec"


def script(path: Path, text: str = "echo HYDRA build details") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bin_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder for this Python (with nothing beside it yet) and one that is all of PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    return tmp_path / "venv", tmp_path / "path"


def test_order_of_launchers(bin_dirs: tuple[Path, Path]) -> None:
    venv, path = bin_dirs
    mpirun = script(path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    assert find_launcher(None, {}) == Launcher((str(mpirun),), "open mpi")
    script(path / "srun")
    assert find_launcher(None, {}).kind == "open mpi"
    assert find_launcher(None, {"SLURM_JOB_ID": "1"}) == Launcher(("srun", "--kill-on-bad-exit=1"), "srun")
    mpiexec = script(venv / "mpiexec")
    assert find_launcher(None, {"SLURM_JOB_ID": "1"}) == Launcher((str(mpiexec),), "hydra")
    script(path / "ibrun")
    assert find_launcher("ibrun -v", {}) == Launcher(("ibrun", "-v"), "")


def test_no_launcher(bin_dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(bin_dirs[1]))
    with pytest.raises(LaunchError, match=r'no MPI launcher found.*pip install "mpitp\[mpich\]"'):
        find_launcher(None, {})
    with pytest.raises(LaunchError, match="no such command"):
        find_launcher("ibrun", {})


def test_binding() -> None:
    assert bind_options(Launcher(("m",), "open mpi"), None) == ["--bind-to", "none"]
    assert bind_options(Launcher(("m",), "hydra"), None) == []
    assert bind_options(Launcher(("m",), "hydra"), "core") == ["-bind-to", "core"]
    assert bind_options(Launcher(("m",), "srun"), "numa") == ["--cpu-bind=ldoms"]
    assert bind_options(Launcher(("ibrun",), ""), None) == []
    with pytest.raises(UsageError, match="--bind"):
        bind_options(Launcher(("ibrun",), ""), "core")


def test_variables_for_open_mpi() -> None:
    open_mpi = Launcher(("m",), "open mpi")
    policy = "PRTE_MCA_rmaps_default_mapping_policy"
    assert launcher_variables(Launcher(("m",), "hydra"), {}, is_root=True) == {}
    added = launcher_variables(open_mpi, {}, is_root=True)
    assert added["OMPI_ALLOW_RUN_AS_ROOT"] == added["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert added[policy] == ":oversubscribe"
    assert policy not in launcher_variables(open_mpi, {"SLURM_JOB_ID": "1"}, is_root=False)
    assert policy not in launcher_variables(open_mpi, {policy: "core"}, is_root=False)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in launcher_variables(open_mpi, {}, is_root=False)


def test_scripts_run_under_mpi4py() -> None:
    assert rank_command(["train", "x.toml"]) == [sys.executable, "-m", "mpitp", "train", "x.toml"]
    assert rank_command(["my.py", "-x"]) == [sys.executable, "-m", "mpi4py", "my.py", "-x"]


@pytest.mark.parametrize(
    "words", [["launch", "-n", "2"], ["launch", "-n", "2", "--"], ["launch", "-n", "0", "--", "doctor"]]
)
def test_mistakes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith("UsageError: ")


def test_dry_run_prints_the_command(bin_dirs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    script(bin_dirs[0] / "mpiexec")
    assert cli.main(["launch", "-n", "3", "--dry-run", "--", "train", "a b.toml"]) == 0
    expected = f"mpitp launch: {bin_dirs[0]}/mpiexec -n 3 {sys.executable} -m mpitp train 'a b.toml'\n"
    assert capsys.readouterr().err == expected


def test_own_python_is_used_when_the_command_is_replaced(monkeypatch: pytest.MonkeyPatch, bin_dirs) -> None:
    script(bin_dirs[0] / "mpiexec")
    called = []
    monkeypatch.setattr(launch_command.os, "execvpe", lambda *args: called.append(args))
    cli.main(["launch", "-n", "1", "--", "doctor"])
    (name, command, environ) = called[0]
    assert (name, command[-2:]) == (str(bin_dirs[0] / "mpiexec"), ["mpitp", "doctor"])
    assert environ["PATH"].startswith(str(bin_dirs[1]))


@pytest.mark.skipif(not MPIEXEC.exists(), reason="this environment has no mpiexec")
def test_exit_code_is_the_job_s() -> None:
    command = [sys.executable, "-m", "mpitp", "launch", "-n", "2", "--", "no-such-verb"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.count("UsageError: mpitp has no verb 'no-such-verb'") == 1
