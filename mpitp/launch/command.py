"""`mpitp launch`: find the launcher that belongs to this Python's MPI, and start a job with it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitp.backend.thread_room import OWN_THREADS, require_threads, thread_limit_words
from mpitp.error_stream import ON_TERMINAL, ErrorStream
from mpitp.errors import FileError, LaunchError, UsageError
from mpitp.launch.allocation import believed, srun_failure
from mpitp.launch.quoted import needs_quotes, quoted

_DESCRIPTION = """\
Start an mpitp command on several ranks, with the launcher that belongs to the MPI library in use:

  inside a SLURM allocation   srun; with --mpi=pmi2 when an MPICH is installed beside this Python (mpitp[mpich]);
                              for an Open MPI beside it (mpitp[openmpi]) its own mpiexec, which finds the allocation
  anywhere else               the mpiexec beside this Python, else mpiexec or mpirun on the PATH; so in an allocation
                              of one host without a working srun (a container inside a job)

A launcher and an MPI library of different makes would start many one-rank jobs, which mpitp refuses. srun is also told
to end the job when a rank dies (--kill-on-bad-exit) and, again, the job's --cpus-per-task, which it doesn't inherit."""

_EPILOG = """\
examples:
  mpitp launch -n 4 -- train run.toml
  mpitp launch -n 2 -- doctor
  mpitp launch -- train run.toml                       in a SLURM allocation: on all its tasks
  mpitp launch -n 64 --launcher "srun --mpi=pmix" -- train run.toml
  mpitp launch -n 2 -- my_script.py --its options      a script of your own, run by `python -m mpi4py`
  mpitp launch -n 4 --dry-run -- generate --model DIR --prompt Hello
  cat prompts.txt | mpitp launch -n 2 -- generate --model DIR --prompts -
  MPITP_LAUNCHER=ibrun mpitp launch -n 8 -- doctor     the same as --launcher ibrun

Each rank's BLAS gets the cores it may use, divided by the ranks on its node, unless OMP_NUM_THREADS is set.

Of an mpiexec, mpitp launch stays the parent. A signal to it goes to the job: on TERM or USR1 a training run saves and
exits with 75. Standard input, where a verb reads it (generate --prompts -), reaches rank 0 as a file in TMPDIR."""

_BINDINGS = {
    "open mpi": {"none": ["--bind-to", "none"], "core": ["--bind-to", "core"], "numa": ["--bind-to", "numa"]},
    "hydra": {"none": ["-bind-to", "none"], "core": ["-bind-to", "core"], "numa": ["-bind-to", "numa"]},
    "srun": {"none": ["--cpu-bind=none"], "core": ["--cpu-bind=cores"], "numa": ["--cpu-bind=ldoms"]},
}

MOST_RANKS = 1_000_000  # MPICH's mpiexec takes the number modulo 2**32

_HOST_VARIABLES = ("HYDRA_HOST_FILE", "HYDRA_HOSTS", "PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")
_ALLOCATION_VARIABLES = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that starts ranks; `kind` is "open mpi", "hydra", "srun", "ibrun", or "" for one that isn't known."""

    command: tuple[str, ...]
    kind: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp launch`."""
    parser.usage = "mpitp launch [-h] [-n N] [--launcher COMMAND] [--bind {none,core,numa}] [--dry-run] -- VERB ..."
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument(
        "-n",
        "--ranks",
        type=int,
        metavar="N",
        help="how many ranks to start (default: the tasks of the SLURM allocation)",
    )
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        default=os.environ.get("MPITP_LAUNCHER"),
        help='use this launcher, e.g. "ibrun"; "-n N" is added (default: the variable MPITP_LAUNCHER)',
    )
    parser.add_argument(
        "--bind", choices=("none", "core", "numa"), help="bind each rank to a core or NUMA node (default: none)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and the variables, run nothing")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- VERB ...", help="what each rank runs, as after `mpitp`"
    )


def run(args: argparse.Namespace) -> int:
    """Start the job and return its exit code.

    Of an mpiexec this process stays the parent; any other launcher takes its place, so that signals and the exit code
    are the job's own.
    """
    words = launched_words(args)
    belief = believed(os.environ, socket.gethostname(), srun_failure, is_named=bool(args.launcher))
    for note in belief.notes:
        _note(note)
    ranks = number_of_ranks(args.ranks, belief.decide)
    if not words:
        raise UsageError("nothing to launch; write the command after --, for example: mpitp launch -n 2 -- doctor")
    if is_script(words) and not Path(words[0]).is_file():
        raise FileError(f"can't read {words[0]}: there is no such file")  # once, not by every rank
    launcher = find_launcher(args.launcher, belief.decide)
    start = [*launcher.command, *count_options(launcher, ranks), *bind_options(launcher, args.bind)]
    added = launcher_variables(launcher, belief.decide, is_root=os.geteuid() == 0)
    if added:
        _note("set for Open MPI: " + " ".join(f"{name}={value}" for name, value in added.items()))
    _note(shlex.join([*start, *rank_command(words)]))
    if args.dry_run:
        return 0
    environ = {**belief.job, **added, ON_TERMINAL: str(int(ErrorStream().isatty()))}
    from mpitp.launch.standard_input import from_file, refuse_pipes

    if launcher.kind not in _KINDS.values():
        refuse_pipes(words)
        os.execvpe(start[0], [*start, *rank_command(words)], environ)

    with from_file(words) as words:
        return _run_mpiexec(launcher, [*start, *rank_command(words)], environ, words, ranks)


def _run_mpiexec(
    launcher: Launcher, command: Sequence[str], environ: Mapping[str, str], words: Sequence[str], ranks: int
) -> int:
    """Run the job below this process. No verb reads standard input itself; a script may."""
    from mpitp.launch.mpiexec import Job, passed_as
    from mpitp.launch.supervise import heeded_signals, training
    from mpitp.launch.witness import run_and_explain

    ranks_here = ranks if _comes_here_whole(launcher, environ) else 1
    if launcher.kind == "hydra" and words[0] != "doctor":  # which shows it among other facts
        _refuse_small_shm(ranks_here)
    require_threads(ranks_here * (1 + OWN_THREADS) + OWN_THREADS, f"a job of {ranks} ranks")
    job = Job(command, environ, stdin=None if is_script(words) else subprocess.DEVNULL)
    settings = training(words)
    heeded = heeded_signals(words, settings)
    job.outlives_reader = settings is not None
    job.passed_as = passed_as(launcher.kind, heeded)
    job.saves_on_int = "INT" in heeded
    return run_and_explain(job, None if settings is None else Path(settings.run_dir), ranks)


def _comes_here_whole(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Whether all ranks are started on this host: neither the user nor a batch system has named others."""
    return len(launcher.command) == 1 and not any(
        name in environ for name in (*_ALLOCATION_VARIABLES, *_HOST_VARIABLES)
    )


def _refuse_small_shm(ranks: int) -> None:
    """Before any rank has begun, what is free in /dev/shm is what they get."""
    from mpitp.comm.shm_room import shm_failure, shm_room

    if failure := shm_failure("MPICH", ranks, shm_room(), has_begun=False):
        raise LaunchError(failure)


def launched_words(args: argparse.Namespace) -> list[str]:
    """What follows the `--`: a verb, or a script, with its arguments."""
    return args.command[1:] if args.command[:1] == ["--"] else list(args.command)


def is_script(words: Sequence[str]) -> bool:
    """Whether the words begin with a Python script rather than with a verb."""
    return bool(words) and words[0].endswith(".py")


def rank_command(words: Sequence[str]) -> list[str]:
    """What each rank runs: an mpitp verb, or a Python script under mpi4py's runner, which ends the job on errors.

    As by the console script, nothing is imported from the current folder (-P), where a random.py may lie.
    """
    module = "mpi4py" if is_script(words) else "mpitp"
    if needs_quotes(words):
        return [sys.executable, "-P", "-m", "mpitp.launch.quoted", module, *quoted(words)]
    return [sys.executable, "-P", "-m", module, *words]


def number_of_ranks(wanted: int | None, environ: Mapping[str, str]) -> int:
    """What `-n` says, else the tasks of the SLURM allocation.

    Raises UsageError when neither does, or the number isn't 1 to MOST_RANKS.
    """
    if wanted is None:
        told = environ.get("SLURM_NTASKS", "")
        if not told.isdecimal() or len(told) > 9:
            odd = f"SLURM_NTASKS={told} is no number of ranks. " if told else ""
            raise UsageError(
                f"{odd}how many ranks? Say -n N (inside a SLURM allocation with --ntasks it may be left out)"
            )
        wanted = int(told)
    if wanted < 1:
        raise UsageError(f"-n {wanted}: a job has at least one rank")
    if wanted > MOST_RANKS:
        raise UsageError(f"-n {wanted}: a job has at most {MOST_RANKS} ranks")
    return wanted


def count_options(launcher: Launcher, ranks: int) -> list[str]:
    """How the launcher is told the number of ranks. TACC's ibrun takes it only together with an offset."""
    return ["-n", str(ranks), *(["-o", "0"] if launcher.kind == "ibrun" else [])]


def find_launcher(named: str | None, environ: Mapping[str, str]) -> Launcher:
    """The launcher to use. Raises LaunchError when there is none, UsageError when `named` can't be read."""
    beside = Path(sys.executable).parent / "mpiexec"
    make = make_of(str(beside)) if os.access(beside, os.X_OK) else ""
    if named:
        return _named_launcher(named, make, environ)
    if "SLURM_JOB_ID" in environ and shutil.which("srun") and make in ("", "mpich"):
        mpi_types = _mpi_types_of_srun() if make else ()
        if not make or "pmi2" in mpi_types:
            return Launcher(("srun", *srun_options((), environ, make, mpi_types)), "srun")
        _note("srun here offers no pmi2, by which ranks of this Python's MPICH meet: its mpiexec starts them")
    if make:
        return Launcher((str(beside),), _KINDS[make])
    found = shutil.which("mpiexec") or shutil.which("mpirun")
    if found:
        return Launcher((found,), _KINDS[make_of(found)])
    raise LaunchError(
        "no MPI launcher found: no mpiexec beside this Python or on the PATH, and no SLURM allocation; install an MPI "
        'into this environment with pip install "mpitp[mpich]", or load the MPI module of this site'
    )


def srun_options(
    given: Sequence[str], environ: Mapping[str, str], make: str, mpi_types: Collection[str]
) -> tuple[str, ...]:
    """What srun must be told beyond the options given; the user's words and SLURM's own variables go before.

    `make`: of the MPI library beside this Python ("": there is none, the site's own is in use and srun's default is
    right). `mpi_types`: what `srun --mpi=list` lists.
    """
    options = []
    if not _has_option(given, "-K", "--kill-on-bad-exit") and "SLURM_KILL_BAD_EXIT" not in environ:
        options.append("--kill-on-bad-exit=1")  # else the other ranks wait for a dead one until the time limit
    if make == "mpich" and "pmi2" in mpi_types and not _has_option(given, "--mpi") and "SLURM_MPI_TYPE" not in environ:
        options.append("--mpi=pmi2")
    cpus = environ.get("SRUN_CPUS_PER_TASK") or environ.get("SLURM_CPUS_PER_TASK")
    if cpus and not _has_option(given, "-c", "--cpus-per-task"):
        options.append(f"--cpus-per-task={cpus}")  # since SLURM 22.05 a step doesn't inherit it
    if _is_in_step(environ) and not _has_option(given, "--overlap"):
        options.append("--overlap")  # the step around us holds the cores; without this the new one waits for ever
    return tuple(options)


def _named_launcher(named: str, make: str, environ: Mapping[str, str]) -> Launcher:
    """The user's own words, completed where the launcher is a known one. Raises UsageError where they aren't words."""
    try:
        words = shlex.split(named)
    except ValueError as error:  # such as "No closing quotation"
        reason = str(error)[:1].lower() + str(error)[1:]
        raise UsageError(f"launcher {named!r}: not words as a shell reads them: {reason}") from None
    places = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = shutil.which(words[0], path=places) if words else None
    if found is None:
        raise LaunchError(f"launcher {named!r}: there is no such command on the PATH")
    name = Path(words[0]).name
    if name == "srun":
        mpi_types = _mpi_types_of_srun() if make == "mpich" else ()
        return Launcher((*words, *srun_options(words[1:], environ, make, mpi_types)), "srun")
    if name in ("mpiexec", "mpirun", "mpiexec.hydra", "prterun", "orterun"):
        return Launcher((found, *words[1:]), _KINDS[make_of(found)])
    return Launcher(tuple(words), "ibrun" if name == "ibrun" else "")


_KINDS = {"open mpi": "open mpi", "mpich": "hydra", "other": "hydra"}


def make_of(mpiexec: str) -> str:
    """Which MPI an mpiexec belongs to: "open mpi", "mpich", or "other" (Intel MPI and its like)."""
    told = _told_by([mpiexec, "--version"])
    if any(name in told for name in ("Open MPI", "OpenRTE", "PRRTE", "prterun")):
        return "open mpi"
    return "mpich" if "HYDRA build details" in told else "other"


def _mpi_types_of_srun() -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", _told_by(["srun", "--mpi=list"])))


_ANSWER_SECONDS = 30


def _told_by(command: list[str]) -> str:
    """What a launcher says of itself, on both streams. LaunchError where it can't be started or doesn't answer."""
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{shlex.join(command)} gave no answer within {_ANSWER_SECONDS} s") from None
    except BlockingIOError:
        raise LaunchError(thread_limit_words(f"{command[0]} is one more process")) from None
    except OSError as error:
        raise LaunchError(f"can't start {command[0]}: {error.strerror}") from None
    return told.stdout + told.stderr


def _has_option(words: Sequence[str], *names: str) -> bool:
    """Whether an option is among the words: as `--name`, `--name=value`, `-c` or `-c4`."""
    for word in words:
        for name in names:
            if word == name or word.startswith(name + "=" if name.startswith("--") else name):
                return True
    return False


_INTERACTIVE_STEP = "4294967290"  # where salloc may put its shell; steps of other commands overlap with it anyway


def _is_in_step(environ: Mapping[str, str]) -> bool:
    return environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP


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
    """A line on stderr; where that is closed or full, none, and never one on stdout."""
    print(f"mpitp launch: {text}", file=ErrorStream(), flush=True)
