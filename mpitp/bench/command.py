"""The verb `mpitp bench`: train, decode, serve, allreduce, scaling, replicas, shares, save, pipeline, axes..."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitp.bench.options import BENCHES
from mpitp.error_stream import ErrorStream
from mpitp.errors import UsageError

if TYPE_CHECKING:
    from mpitp.comm.group import Group

_DESCRIPTION = """\
Measure this machine and mpitp on it, at the ranks at hand. Times are only told beside what bounds them, measured in
the same run and in turns with them (A B A B ...), so that the ratios hold on a busy machine too."""

_EPILOG = """\
examples:
  mpitp bench train                                    the step of a small GPT-2 against its matrix products
  mpitp bench train --invariant                        and what the invariant mode costs
  mpitp launch -n 2 -- bench train --sequence-parallel  and what sequence parallelism costs
  mpitp launch -n 2 -- bench train --context-parallel ring --batch 1 --seq 4096    against one rank on a long sequence
  mpitp bench train --recompute full                   and a step that computes its blocks again in backward
  mpitp launch -n 2 -- bench train --against torch --peer-python venv-with-torch/bin/python
  mpitp launch -n 2 -- bench train --model llama --kv-heads 2
  mpitp bench types                                    each type's step against its products
  mpitp bench decode --model models/smollm2-135m --batch 8
  mpitp bench decode --model models/smollm2-135m --against transformers --peer-python venv-with-torch/bin/python
  mpitp bench serve --texts 16                         texts together against one, and the server against the engine
  mpitp launch -n 2 -- bench allreduce
  mpitp launch -n 4 -- bench allreduce --ranks-per-node 2
  mpitp launch -n 4 -- bench allreduce --group examples/your_own_all_reduce.py:Ring
  mpitp launch -n 2 -- bench scaling --out scaling.json --plot scaling.png
  mpitp launch -n 2 -- bench replicas                  data parallelism and ZeRO against ranks by themselves
  mpitp launch -n 2 -- bench shares --slow 0.5         a slow rank, with equal shares and with measured ones
  mpitp launch -n 2 -- bench save --dir /scratch
  mpitp launch -n 2 -- bench axes                      all ranks along tp, pp or dp, beside what the bytes say
  mpitp launch -n 2 -- bench pipeline --microbatches 8   1F1B and zero-bubble against what their bubbles allow
  mpitp launch -n 2 -- bench experts --shared 256      a mixture's step against the products of its tokens as routed

`mpitp bench train --help` etc. tell the options of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp bench`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    verbs = parser.add_subparsers(dest="what", required=True, metavar="|".join(BENCHES))
    for name, bench in BENCHES.items():
        sub = verbs.add_parser(
            name, help=bench.line, description=bench.description, formatter_class=parser.formatter_class
        )
        sub.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
        bench.add(sub)


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 prints. Raises UsageError for sizes that can't be."""
    _check(args)
    from mpitp.backend.threads import limit_blas_threads
    from mpitp.checkpoint.load import model_facts
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import join_ranks

    program = import_module(f"mpitp.bench.{BENCHES[args.what].module}")  # it measures, and reports what it measured
    group = join_ranks()
    folder = args.model if args.what in ("decode", "serve") else None
    agree(group, lambda: call_facts("bench", args) | model_facts("--model", folder))
    if getattr(args, "against", None):
        limit_blas_threads(1)  # as the peer
    _check_job(args, group)
    facts = program.measure(args, group)
    if group.rank == 0:
        _tell(args, program, facts)  # first: a disk that has become full takes no numbers away
        _write_files(args, facts)
    return 0


def _check_job(args: argparse.Namespace, group: Group) -> None:
    """Refuse what can't be measured on so many ranks."""
    from mpitp.bench.machine import machine_facts

    if getattr(args, "clock", "wall") == "cpu" and (group.size > 1 or machine_facts(group)["blas_threads"] > 1):
        raise UsageError(
            "--clock cpu is right for one rank with one BLAS thread only (it adds up threads and leaves out waiting); "
            "set OMP_NUM_THREADS=1 and start one rank, or use --clock wall"
        )
    if args.what == "decode" and args.against and group.size > 1:
        raise UsageError(f"--against transformers compares on one core; this is a job of {group.size} ranks")


def _tell(args: argparse.Namespace, program: Any, facts: dict[str, Any]) -> None:
    """Print what was measured, and what the machine makes doubtful of it."""
    from mpitp.bench.machine import describe, warnings_of

    warnings = warnings_of(facts["machine"])
    for warning in warnings:
        print(f"mpitp bench: warning: {warning}", file=ErrorStream())
    if args.json:
        import json

        print(json.dumps({"bench": args.what, **facts, "warnings": warnings}, indent=2))
    else:
        print("\n".join([describe(facts["machine"]), *program.report(facts)]))


def _write_files(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    if args.what == "machine":
        if args.out:
            from mpitp.files import replace_file

            replace_file(Path(args.out), facts["file"])
        return
    if getattr(args, "out", None):
        from mpitp.bench.scaling import write_table

        write_table(facts, args.out)
    if getattr(args, "plot", None):
        from mpitp.bench.plot import draw

        draw(args.what, facts, args.plot)


def _check(args: argparse.Namespace) -> None:
    BENCHES[args.what].check(args)
    if getattr(args, "plot", None):
        from mpitp.bench.plot import check_plot

        check_plot(args.plot)
    if getattr(args, "out", None):
        from mpitp.files import check_place

        check_place(args.out, "write to")
