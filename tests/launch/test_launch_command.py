from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpitp import cli
from mpitp.errors import LaunchError, UsageError
from mpitp.launch import command as launch_command
from mpitp.launch.command import (
    Launcher,
    bind_options,
    count_options,
    find_launcher,
    launcher_variables,
    number_of_ranks,
    rank_command,
)
from tests.launch.test_launch_faults import environment, needs_mpiexec
from tests.launch.without_srun import path_without_srun

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
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{path_without_srun(tmp_path, '/usr/bin:/bin')}")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MPITP_"))]:
        monkeypatch.delenv(name)
    return tmp_path / "venv", tmp_path / "path"


def test_order_of_launchers(bin_dirs: tuple[Path, Path]) -> None:
    venv, path = bin_dirs
    mpirun = script(path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    assert find_launcher(None, {}) == Launcher((str(mpirun),), "open mpi")
    script(path / "srun")
    assert find_launcher(None, {}).kind == "open mpi"
    assert find_launcher(None, {"SLURM_JOB_ID": "1"}) == Launcher(("srun", "--kill-on-bad-exit=1"), "srun")
    mpiexec = script(venv / "mpiexec")
    assert find_launcher(None, {}) == Launcher((str(mpiexec),), "hydra")


BILLIONS = ["launch", "-n", "4294967298", "--", "doctor"]
SLURM = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "4"}
LIST = "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n'"


@pytest.mark.parametrize(
    ("beside", "srun", "expected"),
    [
        (None, LIST, ("srun", "--kill-on-bad-exit=1", "--cpus-per-task=4")),  # the site's MPI: srun knows it
        ("HYDRA build details", LIST, ("srun", "--kill-on-bad-exit=1", "--mpi=pmi2", "--cpus-per-task=4")),
        ("HYDRA build details", "echo none pmix", ("mpiexec",)),
        ("mpirun (Open MPI) 5.0.11", LIST, ("mpiexec",)),
        ("Intel(R) MPI Library for Linux* OS", LIST, ("mpiexec",)),
    ],
)
def test_launcher_in_a_slurm_allocation(
    bin_dirs: tuple[Path, Path], beside: str | None, srun: str, expected: tuple[str, ...]
) -> None:
    venv, path = bin_dirs
    script(path / "srun", srun)
    if beside:
        script(venv / "mpiexec", f"echo '{beside}'")
    command = find_launcher(None, SLURM).command
    assert command == tuple(word.replace("mpiexec", f"{venv}/mpiexec") for word in expected)


@pytest.mark.parametrize(
    ("named", "environ", "expected"),
    [
        ("srun", SLURM, "srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=4"),
        ("srun --mpi=pmix -c2 -K0", SLURM, "srun --mpi=pmix -c2 -K0"),
        ("srun --cpus-per-task 2", SLURM, "srun --cpus-per-task 2 --kill-on-bad-exit=1 --mpi=pmi2"),
        ("srun", {"SLURM_MPI_TYPE": "pmix", "SLURM_KILL_BAD_EXIT": "1"}, "srun"),
        ("srun -N1", {"SLURM_STEP_ID": "0"}, "srun -N1 --kill-on-bad-exit=1 --mpi=pmi2 --overlap"),
        ("srun", {"SLURM_STEP_ID": "4294967290"}, "srun --kill-on-bad-exit=1 --mpi=pmi2"),
        ("srun", {"SRUN_CPUS_PER_TASK": "3"}, "srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=3"),
        ("ibrun -v", SLURM, "ibrun -v"),
        ("mpirun -v", SLURM, "BESIDE/mpirun -v"),
    ],
)
def test_named_launchers_are_completed(
    bin_dirs: tuple[Path, Path], named: str, environ: dict[str, str], expected: str
) -> None:
    venv, path = bin_dirs
    script(path / "srun", LIST)
    script(path / "ibrun")
    script(venv / "mpiexec")
    script(venv / "mpirun")
    assert " ".join(find_launcher(named, environ).command) == expected.replace("BESIDE", str(venv))


def test_kinds_of_named_launchers(bin_dirs: tuple[Path, Path]) -> None:
    script(bin_dirs[1] / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    script(bin_dirs[1] / "ibrun")
    assert find_launcher("mpirun", {}).kind == "open mpi"
    ibrun = find_launcher("ibrun", {})
    assert count_options(ibrun, 8) == ["-n", "8", "-o", "0"]
    assert count_options(Launcher(("m",), "hydra"), 8) == ["-n", "8"]


def test_number_of_ranks() -> None:
    assert number_of_ranks(3, SLURM) == 3
    assert number_of_ranks(None, SLURM) == 8
    assert number_of_ranks(1_000_000, {}) == 1_000_000
    for many in (1_000_001, 2**32 + 2, 99999999999999999999):  # MPICH would start 2 for the second
        with pytest.raises(UsageError, match=f"-n {many}: a job has at most 1000000 ranks"):
            number_of_ranks(many, {})
    with pytest.raises(UsageError, match="how many ranks"):
        number_of_ranks(None, {})


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
    assert rank_command(["train", "x.toml"]) == [sys.executable, "-P", "-m", "mpitp", "train", "x.toml"]
    assert rank_command(["my.py", "-x"]) == [sys.executable, "-P", "-m", "mpi4py", "my.py", "-x"]


@pytest.mark.parametrize(
    "words", [["launch", "-n", "2"], ["launch", "-n", "2", "--"], ["launch", "-n", "0", "--", "doctor"], BILLIONS]
)
def test_mistakes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith("UsageError: ")


@pytest.mark.parametrize("named", ["'", "a 'b", "mpiexec \\"])
def test_launcher_that_is_no_words_is_refused(
    named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "-n", "2", "--launcher", named, "--", "doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"UsageError: launcher {named!r}: not words as a shell reads them: no ")
    monkeypatch.setenv("MPITP_LAUNCHER", named)
    assert cli.main(["launch", "-n", "2", "--", "doctor"]) == 2
    assert capsys.readouterr().err == said


def test_missing_script_is_refused_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "-n", "2", "--", "none.py"]) == 4
    assert capsys.readouterr().err == "FileError: can't read none.py: there is no such file\n"


def test_dry_run_prints_the_command(bin_dirs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    script(bin_dirs[0] / "mpiexec")
    assert cli.main(["launch", "-n", "3", "--dry-run", "--", "train", "a b.toml"]) == 0
    expected = f"mpitp launch: {bin_dirs[0]}/mpiexec -n 3 {sys.executable} -P -m mpitp train 'a b.toml'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("place", ["2>&-", "2>/dev/full"])
def test_notes_that_nobody_can_read_change_nothing(place: str) -> None:
    words = ["-m", "mpitp", "launch", "-n", "1", "--launcher", "env", "--dry-run", "--", "doctor"]
    command = ["sh", "-c", f'exec "$0" "$@" {place}', sys.executable, *words]
    result = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, b"")


def test_dry_run_in_an_allocation(
    bin_dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(bin_dirs[0] / "mpiexec")
    script(bin_dirs[1] / "srun", LIST)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["launch", "--dry-run", "--", "train", "x.toml"]) == 0
    expected = f"srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=4 -n 8 {sys.executable} -P -m mpitp train x.toml"
    assert capsys.readouterr().err == f"mpitp launch: {expected}\n"
    monkeypatch.setenv("MPITP_LAUNCHER", "ibrun")
    script(bin_dirs[1] / "ibrun")
    assert cli.main(["launch", "--dry-run", "--", "doctor"]) == 0
    assert capsys.readouterr().err == f"mpitp launch: ibrun -n 8 -o 0 {sys.executable} -P -m mpitp doctor\n"


def test_srun_takes_this_process_s_place(monkeypatch: pytest.MonkeyPatch, bin_dirs: tuple[Path, Path]) -> None:
    script(bin_dirs[1] / "srun")
    called: list[Any] = []
    monkeypatch.setattr(launch_command.os, "execvpe", lambda *args: called.append(args) or sys.exit(0))
    cli.main(["launch", "-n", "1", "--launcher", "srun", "--", "doctor"])
    (name, command, environ) = called[0]
    assert (name, command[-2:]) == ("srun", ["mpitp", "doctor"])
    assert environ["PATH"].startswith(str(bin_dirs[1]))


def test_mpiexec_of_this_python_is_run(bin_dirs: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    version = 'if [ "$1" = --version ]; then echo HYDRA build details; else printf "%s\\n" "$*"; cat; exit 5; fi'
    script(bin_dirs[0] / "mpiexec", version)
    assert cli.main(["launch", "-n", "1", "--", "doctor"]) == 5
    assert capfd.readouterr().out == f"-n 1 {sys.executable} -P -m mpitp doctor\n"  # and nothing from standard input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "usage: mpitp VERB ..."),
        ([], "usage: mpitp VERB ..."),
        (["--version"], "mpitp "),
        (["generate", "--help"], "usage: mpitp generate "),
        (["data", "prepare", "-h"], "usage: mpitp data prepare "),
    ],
)
def test_help_is_printed_once_and_starts_nothing(
    bin_dirs: tuple[Path, Path], capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    words = words or ["help"]
    assert cli.main(["launch", "-n", "2", "--", *words]) == 0
    out, err = capfd.readouterr()
    assert out.startswith(said) and err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "-n", "2", "--", "doctor"], "launch can't start itself"),
        (["launch", "--help"], "launch can't start itself"),
        (["generate", "--modle", "x"], "the following arguments are required: --model"),
        (["genrate"], "did you mean generate?"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    bin_dirs: tuple[Path, Path], capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["launch", "-n", "2", "--", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("UsageError: ") and said in err


@pytest.mark.parametrize("name", ["PMI", "OMPI_COMM_WORLD"])
def test_ranks_do_not_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{name}_SIZE", "2")
    monkeypatch.setenv(f"{name}_RANK", "0")
    with pytest.raises(UsageError, match="has started 2 of these already; run mpitp launch by itself"):
        cli._run(["launch", "-n", "2", "--dry-run", "--", "doctor"])


@pytest.mark.skipif(not MPIEXEC.exists(), reason="this environment has no mpiexec")
def test_exit_code_is_the_job_s() -> None:
    command = [sys.executable, "-m", "mpitp", "launch", "-n", "2", "--", "train", "no-such-file.toml"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 3
    assert result.stderr.count("ConfigError: can't read the run file no-such-file.toml") == 1


ODD_WORDS = [
    "",
    ":",
    "\\:",
    "\\\\:",
    "::",
    "a:b",
    "\\",
    "a\nb",
    " a ",
    "'\"",
    "$HOME",
    "-n",
    "--",
    "*",
    "~",
    "\udcff",
]


@needs_mpiexec
def test_words_arrive_as_they_were(tmp_path: Path) -> None:
    """mpiexec takes a word ":" for its own, wherever it stands."""
    script = tmp_path / "say.py"
    script.write_text("import sys\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: print(ascii(sys.argv[1:]))\n")
    for words in (ODD_WORDS, [word for word in ODD_WORDS if word != ":"], [":"]):
        command = [sys.executable, "-m", "mpitp", "launch", "-n", "2", "--", str(script), *words]
        result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode, result.stdout) == (0, f"{ascii(words)}\n"), result.stderr


@needs_mpiexec
@pytest.mark.parametrize("words", [["doctor"], ["generate", "--model", "none", "--prompt", ":"]])
def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, words: list[str]) -> None:
    for name in ("random", "tqdm", "numpy", "mpi4py", "tokenizers", "encodings"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')\n")
    (tmp_path / "mpitp").mkdir()
    (tmp_path / "mpitp" / "__init__.py").write_text("raise SystemExit('mpitp of the current folder')\n")
    script = tmp_path.parent / f"{tmp_path.name}-script.py"
    script.write_text("import random, tqdm\nfrom mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n")
    environ = environment()
    code = "import sys; from mpitp.cli import main; sys.exit(main())"  # what the console script does
    for launched in (words, [str(script)]):
        command = [sys.executable, "-P", "-c", code, "launch", "-n", "2", "--", *launched]
        result = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert "of the current folder" not in result.stdout + result.stderr, result.stderr
        assert result.returncode == (4 if launched[0] == "generate" else result.returncode)
