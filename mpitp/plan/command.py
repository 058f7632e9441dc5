"""`mpitp plan`: what a run would do, worked out without running it; one subcommand for each question."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mpitp.plan import graph_command, memory_command, schedule_command, search_command, simulate_command

_DESCRIPTION = """\
Work out what a run would do, without running it: no ranks are started and no array is made.
"""

_EPILOG = """\
examples:
  mpitp plan run.toml --ranks 64 --machine machine.toml --memory 32GiB       the best layouts (plan search)
  mpitp plan schedule --pp 4 --microbatches 8 --schedule zb
  mpitp plan memory run.toml --ranks 8
  mpitp plan graph --model models/smollm2 --ranks 8 --mesh tp=4,pp=2
  mpitp plan simulate run.toml --ranks 4096 --machine machine.toml
  mpitp plan schedule --help
"""

_QUESTIONS = {
    "search": search_command,
    "schedule": schedule_command,
    "memory": memory_command,
    "graph": graph_command,
    "simulate": simulate_command,
}


def with_question(words: Sequence[str]) -> list[str]:
    """The words of the command line, with the question in front where a run file stands there alone."""
    is_file = bool(words) and not words[0].startswith("-") and words[0] not in _QUESTIONS
    return ["search", *words] if is_file and words[0].endswith(".toml") else list(words)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of `mpitp plan`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    questions = parser.add_subparsers(dest="question", required=True, metavar="|".join(_QUESTIONS))
    for name, module in _QUESTIONS.items():
        sub = questions.add_parser(name, help=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """Answer one question."""
    return _QUESTIONS[args.question].run(args)
