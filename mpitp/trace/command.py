"""`mpitp trace`: show the communication ledger of a written trace."""

from __future__ import annotations

import argparse
import json

from mpitp.paths import input_path

_DESCRIPTION = """\
Show the communication ledger of a trace that `mpitp train --trace` or `mpitp generate --trace` has written: for each
kind of collective and each place in the model the calls, the bytes, the time spent waiting for the last rank and
transferring, the bandwidth reached, and whether calls and bytes are those of the closed form. Time in which a rank went
on working while a collective ran behind it counts for neither."""

_EPILOG = """\
examples:
  mpitp launch -n 3 -- train run.toml --set train.steps=5 --trace out.json
  mpitp launch -n 2 -- generate --model DIR --prompt "Once upon" --trace out.json
  mpitp trace out.json

The file itself opens in https://ui.perfetto.dev or chrome://tracing: a row for each rank, layers with their collectives
inside them, and in these the wait for the last rank apart from the transfer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp trace`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("file", type=input_path, metavar="TRACE.JSON", help="a trace")
    parser.add_argument("--json", action="store_true", help="the ledger as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the ledger."""
    from mpitp.trace.timeline import read_trace

    trace = read_trace(args.file)
    if args.json:
        rows = [row.as_dict() for row in trace.ledger]
        print(json.dumps({"title": trace.title, "ranks": trace.ranks, "facts": trace.facts, "ledger": rows}))
    else:
        print(trace)
    return 0
