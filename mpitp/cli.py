"""The `mpitp` command: one thin verb for each program.

A verb's module offers `add_arguments(parser)` and `run(args) -> exit code`, is imported only when its verb is asked
for, and imports NumPy and MPI inside `run` only: every `--help` is quick and works where there is no MPI library.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from mpitp import __version__
from mpitp.backend.malloc import keep_blocks_in_heap
from mpitp.backend.thread_room import OWN_THREADS, require_threads, threads_of_libraries
from mpitp.backend.threads import set_thread_environment
from mpitp.comm.abort import install_abort_hook
from mpitp.comm.environment import MPIEXECS, LaunchClaim, forget_launcher, launch_claim
from mpitp.error_stream import escape_what_streams_lack
from mpitp.errors import UsageError
from mpitp.launch.guard import guarded

VERBS: dict[str, tuple[str, str]] = {
    "data": ("mpitp.data.command", "turn text into token files"),
    "train": ("mpitp.launch.planned_train", "train or fine-tune a model as a TOML file says"),
    "generate": ("mpitp.infer.command", "continue prompts with a model"),
    "embed": ("mpitp.infer.embed_command", "turn texts into vectors with an encoder"),
    "serve": ("mpitp.serve.command", "answer requests over HTTP with a model"),
    "eval": ("mpitp.evaluate.command", "measure a model: perplexity, accuracy, exact answers"),
    "classify": ("mpitp.infer.classify_command", "say what images show, or to which class texts or their words belong"),
    "convert": ("mpitp.convert.command", "turn a GGUF file into a Hugging Face directory, or round weights"),
    "launch": ("mpitp.launch.command", "start any of these on several ranks"),
    "doctor": ("mpitp.doctor.command", "check this machine, its MPI, BLAS and GPUs"),
    "verify": ("mpitp.verify.command", "check a layout against the one-rank model, layer by layer"),
    "step": ("mpitp.step.command", "step through one pass of all ranks, operation by operation"),
    "trace": ("mpitp.trace.command", "show the communication ledger of a traced run"),
    "plan": ("mpitp.plan.command", "work out beforehand what a run would do: the best layout, memory, schedules"),
    "bench": ("mpitp.bench.command", "measure speed against what the hardware gives"),
}

# These use no ranks: started on several, the first one does the work and the others leave.
ONE_PROCESS = ("data", "convert", "plan")

_HELP = """\
usage: mpitp VERB ...

Transformers whose every layer is split over MPI ranks.

{verbs}

  mpitp VERB --help          what a verb does, with examples
  mpitp --version
  mpitp launch -n 4 -- VERB ...    run a verb on 4 ranks (or: mpirun -n 4 mpitp VERB ..., srun mpitp VERB ...)

exit codes: 0 done, 2 usage, 3 configuration or shapes, 4 checkpoint or file, 5 numeric failure (NaN),
6 MPI or launch, 75 preempted with the state saved, 1 a bug in mpitp, 130 interrupted, 141 the reader of the output has
left, 128 + N ended by signal N (137: a rank was killed)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A failing rank ends the whole job."""
    _hold_standard_descriptors()
    escape_what_streams_lack()
    return guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _hold_standard_descriptors() -> None:
    """Where standard input, output or error is closed, take its number, so that no file gets it and what is meant for
    people. Using it still fails.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)


def _run(words: list[str]) -> int:
    call = _read(words)
    if call is None:
        return 0
    verb, module, args = call
    claim = launch_claim(os.environ)
    if verb == "launch":  # its ranks must find the environment as the user left it
        return module.run(args) if _can_be_launched(module.launched_words(args), claim) else 0
    if verb in ONE_PROCESS:
        if claim.rank > 0:
            return 0
        forget_launcher(os.environ)  # the others have left: there is no job to end when this one fails
    _prepare_rank(claim)
    return module.run(args)


def _read(words: list[str]) -> tuple[str, Any, argparse.Namespace] | None:
    """The verb, its module and its arguments; None where what was asked for is printed already."""
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help", "help"):
        print(_HELP.format(verbs="\n".join(f"  {name:10} {line}" for name, (_, line) in VERBS.items())), end="")
        return None
    if verb in ("-V", "--version"):
        print(f"mpitp {__version__}")
        return None
    if verb not in VERBS:
        raise UsageError(f"mpitp has no verb {verb!r}{_suggestion(verb)}; mpitp --help lists them")
    module = import_module(VERBS[verb][0])
    parser = _Parser(f"mpitp {verb}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    module.add_arguments(parser)
    rest = module.with_question(words[1:]) if verb == "plan" else words[1:]
    return verb, module, parser.parse_args(rest)


def _can_be_launched(words: list[str], claim: LaunchClaim) -> bool:
    """Look at what every rank would read: help is printed once, and a mistake is found without starting any."""
    if claim.size > 1 and claim.launcher in MPIEXECS:
        raise UsageError(f"{claim.launcher} has started {claim.size} of these already; run mpitp launch by itself")
    if words[:1] == ["launch"]:
        raise UsageError("launch can't start itself: after its -- comes what the ranks run, as mpitp launch -- doctor")
    if not words or words[0].endswith(".py"):  # a script reads its own arguments
        return True
    return _read(words) is not None


def _prepare_rank(claim: LaunchClaim) -> None:
    """What has to be in place before NumPy and MPI are imported."""
    threads = set_thread_environment(os.environ, claim.local_size or claim.size)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads or 1))  # of the tokenizers' library, which takes every core
    require_threads(OWN_THREADS + threads_of_libraries(os.environ), "a rank")
    keep_blocks_in_heap()
    if claim.size > 1:
        install_abort_hook()


def _suggestion(verb: str) -> str:
    near = difflib.get_close_matches(verb, VERBS, n=1)
    return f"; did you mean {near[0]}?" if near else ""


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as UsageError, so that one rank speaks for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage()}see {self.prog} --help")


if __name__ == "__main__":
    sys.exit(main())
