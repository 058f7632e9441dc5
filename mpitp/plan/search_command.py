"""`mpitp plan RUN.toml`: the best layouts of a run on so many ranks of a machine, and why not another."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mpitp.paths import path_option

if TYPE_CHECKING:
    from mpitp.config import RunConfig
    from mpitp.plan.choice import Choice

HELP = "the best layouts on so many ranks of a machine"

_DESCRIPTION = """\
Find the layout of a run that is fastest on a machine and fits into its memory: out of all ways to give the ranks to
tensor, pipeline, data, context and (for mixtures) expert parallelism, with or without sequence parallelism, each level
of ZeRO, recomputing, pipeline schedule and size of a microbatch. Each layout gives the same update, so
train.global_batch_size must be set.

What is told: the fastest few with what limits each, the front of time and memory, whether fewer ranks are as fast, and
what tensor parallelism across nodes costs. A machine file is measured by `mpitp launch -n N -- bench machine`, or
written by hand (examples/machines).
"""

_EPILOG = """\
examples:
  mpitp plan run.toml --ranks 64 --machine machine.toml --memory 32GiB
  mpitp plan run.toml --ranks 64 --machine machine.toml --compare tp=8,pp=1 --compare pp=8,schedule=zb,recompute=full
  mpitp plan run.toml --ranks 64 --machine machine.toml --pareto front.svg --write --job job.sbatch
"""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp plan RUN.toml`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("run_file", type=path_option, metavar="RUN.toml", help="what `mpitp train` takes")
    parser.add_argument("--ranks", type=_count, required=True, metavar="N", help="of the job")
    parser.add_argument("--machine", type=path_option, metavar="FILE", help="default: the run file's mesh.machine")
    parser.add_argument(
        "--memory", type=num_bytes, metavar="SIZE", help="that a rank may take, as 32GiB; default: the machine's"
    )
    parser.add_argument("--best", type=_count, default=5, metavar="K", help="how many layouts to tell; default 5")
    parser.add_argument(
        "--compare", action="append", default=[], metavar="LAYOUT", help="why not this one, as tp=8,pp=1"
    )
    parser.add_argument(
        "--pareto", type=path_option, metavar="FILE", help="draw time and memory to a .svg or .png (needs mpitp[plot])"
    )
    parser.add_argument("--write", action="store_true", help="write the best layout into the run file")
    parser.add_argument("--job", type=path_option, metavar="FILE", help="write a SLURM job for it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run file"
    )
    parser.add_argument("--json", action="store_true", help="all numbers")


def run(args: argparse.Namespace) -> int:
    """Search, tell, write."""
    from mpitp.errors import UsageError
    from mpitp.files import check_place
    from mpitp.plan.choice import choose, machine_of
    from mpitp.plan.layout import tell_of_shares
    from mpitp.plan.pareto import check_front
    from mpitp.plan.search_report import as_dict, lines
    from mpitp.run_file import load_run_config

    if args.pareto:
        check_front(Path(args.pareto))
    if args.job:
        check_place(args.job, "write the job to")
    if args.write and args.set:
        raise UsageError("--write changes the run file, of which --set has replaced keys for this call; leave out one")
    config = load_run_config(args.run_file, args.set)
    tell_of_shares(config)
    machine = machine_of(args.machine or config.mesh.machine)
    choice = choose(config, machine, args.ranks, args.memory, args.best, args.compare)
    print(json.dumps(as_dict(choice)) if args.json else "\n".join(lines(choice)))
    for told in _written(args, config, choice):
        if not args.json:
            print(told)
    return 0


def _written(args: argparse.Namespace, config: RunConfig, choice: Choice) -> list[str]:
    """Write what was asked for; a line on each."""
    from mpitp.files import replace_file
    from mpitp.plan.job_file import job_text
    from mpitp.plan.layout import shares_fit
    from mpitp.plan.pareto import draw_front
    from mpitp.plan.run_file_edit import DROPPED, edit_run_file

    told = []
    if args.pareto:
        draw_front(choice, Path(args.pareto))
        told.append(f"drawn: {args.pareto}")
    best = choice.found.best[0].layout
    if args.write:
        dropped = dict(DROPPED)
        if not shares_fit(config, best):
            dropped["mesh"] = (*DROPPED["mesh"], "shares")
            told.append(f"mesh.shares is left out of {args.run_file}: its weights are those of another layout's ranks")
        edit_run_file(Path(args.run_file), best.keys(), dropped)
        told.append(f"written to {args.run_file}: {best}")
    if args.job:
        replace_file(Path(args.job), job_text(best, choice.machine, args.run_file))
        told.append(f"written: {args.job} (sbatch --account=... {args.job})")
    return told


def _count(text: str) -> int:
    from mpitp.plan.counts import MOST_RANKS, count_in

    if number := count_in(text, MOST_RANKS):
        return number
    raise argparse.ArgumentTypeError(f"{text!r:.60} is no number from 1 to 2^20")


def num_bytes(text: str) -> float:
    """Bytes of "32GiB", "80e9", "512 MB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([KMGT]?I?B?)", text.strip().upper().replace("E", "e"))
    if match is None or match[2] not in _UNITS or not 1 <= float(match[1]) * _UNITS[match[2]] < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of memory: expected such as 32GiB or 80e9")
    return float(match[1]) * _UNITS[match[2]]
