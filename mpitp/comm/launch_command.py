"""`mpitp launch`: find the launcher that belongs to this Python's MPI, and start a job with it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpitp.errors import LaunchError, UsageError

_DESCRIPTION = """\
Start an mpitp command on several ranks. The launcher is looked for in this order: the mpiexec beside this Python (as
`pip install "mpitp[mpich]"` puts it there), srun inside a SLURM allocation, mpiexec or mpirun on the PATH. A launcher
and an MPI library of different makes would start many one-rank jobs, which mpitp refuses."""

_EPILOG = """\
examples:
  mpitp launch -n 4 -- train run.toml
  mpitp launch -n 2 -- doctor
  mpitp launch -n 64 --launcher "srun --mpi=pmi2 -c 8" -- train run.toml
  mpitp launch -n 2 -- my_script.py --its options      a script of your own, run by `python -m mpi4py`
  mpitp launch -n 4 --dry-run -- generate --model DIR --prompt Hello

Each rank's BLAS gets the cores it may use, divided by the ranks on its node, unless OMP_NUM_THREADS is set."""

_BINDINGS = {
    "open mpi": {"none": ["--bind-to", "none"], "core": ["--bind-to", "core"], "numa": ["--bind-to", "numa"]},
    "hydra": {"none": ["-bind-to", "none"], "core": ["-bind-to", "core"], "numa": ["-bind-to", "numa"]},
    "srun": {"none": ["--cpu-bind=none"], "core": ["--cpu-bind=cores"], "numa": ["--cpu-bind=ldoms"]},
}

_ALLOCATION_VARIABLES = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that starts ranks; `kind` is "open mpi", "hydra", "srun", or "" for one that the user named."""

    command: tuple[str, ...]
    kind: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp launch`."""
    parser.usage = "mpitp launch [-h] -n N [--launcher COMMAND] [--bind {none,core,numa}] [--dry-run] -- VERB ..."
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks to start")
    parser.add_argument("--launcher", metavar="COMMAND", help='use this launcher, e.g. "ibrun"; "-n N" is added')
    parser.add_argument(
        "--bind", choices=("none", "core", "numa"), help="bind each rank to a core or NUMA node (default: none)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and the variables, run nothing")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- VERB ...", help="what each rank runs, as after `mpitp`"
    )


def run(args: argparse.Namespace) -> int:
    """Replace this process by the launcher's, so that signals and the exit code are the job's own."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.ranks < 1:
        raise UsageError(f"-n {args.ranks}: a job has at least one rank")
    if not words:
        raise UsageError("nothing to launch; write the command after --, for example: mpitp launch -n 2 -- doctor")
    launcher = find_launcher(args.launcher, os.environ)
    command = [*launcher.command, "-n", str(args.ranks), *bind_options(launcher, args.bind), *rank_command(words)]
    added = launcher_variables(launcher, os.environ, is_root=os.geteuid() == 0)
    if added:
        _note("set for Open MPI: " + " ".join(f"{name}={value}" for name, value in added.items()))
    _note(shlex.join(command))
    if args.dry_run:
        return 0
    os.execvpe(command[0], command, {**os.environ, **added})


def rank_command(words: list[str]) -> list[str]:
    """What each rank runs: an mpitp verb, or a Python script under mpi4py's runner, which ends the job on errors."""
    module = "mpi4py" if words[0].endswith(".py") else "mpitp"
    return [sys.executable, "-m", module, *words]


def find_launcher(named: str | None, environ: Mapping[str, str]) -> Launcher:
    """The launcher to use. Raises LaunchError when there is none."""
    if named:
        command = tuple(shlex.split(named))
        if not command or shutil.which(command[0]) is None:
            raise LaunchError(f"--launcher {named!r}: there is no such command on the PATH")
        return Launcher(command, "srun" if Path(command[0]).name == "srun" else "")
    beside = Path(sys.executable).parent / "mpiexec"
    if os.access(beside, os.X_OK):
        return Launcher((str(beside),), _kind_of(str(beside)))
    if "SLURM_JOB_ID" in environ and shutil.which("srun"):
        return Launcher(("srun", "--kill-on-bad-exit=1"), "srun")
    found = shutil.which("mpiexec") or shutil.which("mpirun")
    if found:
        return Launcher((found,), _kind_of(found))
    raise LaunchError(
        "no MPI launcher found: no mpiexec beside this Python or on the PATH, and no SLURM allocation; install an MPI "
        'into this environment with pip install "mpitp[mpich]", or load the MPI module of this site'
    )


def _kind_of(mpiexec: str) -> str:
    told = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    return "open mpi" if any(name in told for name in ("Open MPI", "OpenRTE", "PRRTE", "prterun")) else "hydra"


def bind_options(launcher: Launcher, binding: str | None) -> list[str]:
    """The launcher's options for `--bind`.

    Unbound by default: Open MPI would bind each rank to one core, and threads are dealt out from the cores of the node.
    srun's default (each task its share of the allocation) is left alone.
    """
    if binding is None and launcher.kind != "open mpi":
        return []
    if launcher.kind not in _BINDINGS:
        raise UsageError("--bind isn't known for this launcher; put its own option into --launcher")
    return _BINDINGS[launcher.kind][binding or "none"]


def launcher_variables(launcher: Launcher, environ: Mapping[str, str], is_root: bool) -> dict[str, str]:
    """What Open MPI needs to run as root (containers), and more ranks than cores on one's own machine."""
    if launcher.kind != "open mpi":
        return {}
    wanted = {"OMPI_MCA_osc": "^ucx"}  # the UCX component of the PyPI build can't open shared windows, and says so
    if is_root:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not any(name in environ for name in _ALLOCATION_VARIABLES):
        wanted["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    return {name: value for name, value in wanted.items() if name not in environ}


def _note(text: str) -> None:
    print(f"mpitp launch: {text}", file=sys.stderr, flush=True)
