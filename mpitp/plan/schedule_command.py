"""`mpitp plan schedule`: a pipeline schedule as a chart, with its idle time and the activations it holds."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from mpitp.paths import path_option
from mpitp.pipeline.schedules import SCHEDULES
from mpitp.pipeline.simulate import Durations

HELP = "who computes what, and when, in a pipeline"

_DESCRIPTION = """\
Draw who computes what, and when, where a model's layers are dealt to --pp stages and a step's batch comes in
--microbatches. A row is a stage, to the right goes time: F forward, B backward; or backward in its two halves, I for
the gradients of the input, for which the stage before waits, and W for those of the weights, for which nobody waits.
What is empty is idle: the bubble.

schedules (p stages, m microbatches, v chunks a stage; the bubble's share where sends take no time):
  gpipe        all forwards, then all backwards: (p-1) / (m+p-1), and m activations in flight
  1f1b         forwards and backwards in turn: the same bubble, but p-s activations in flight on stage s
  interleaved  1f1b over v smaller chunks a stage: (p-1) / (v m+p-1), with v times the messages
  zb           1f1b with weight gradients put off into the idle end (ZB-H1): a third of the bubble where
               F = I = W, with at most p activations in flight on each stage
"""

_EPILOG = """\
examples:
  mpitp plan schedule --pp 4 --microbatches 8 --schedule zb
  mpitp plan schedule --pp 4 --microbatches 8 --schedule interleaved --chunks 2
  mpitp plan schedule --pp 4 --microbatches 8 --schedule 1f1b --times 1,1.1,0.9 --send 0.2
  mpitp plan schedule --pp 4 --microbatches 8 --schedule zb --out chart.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp plan schedule`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="microbatches of a step")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="default 1f1b")
    parser.add_argument("--chunks", type=int, metavar="V", help="chunks a stage, for interleaved; default 2")
    parser.add_argument(
        "--times", type=_times, default=(1.0, 1.0, 1.0), metavar="F,I,W",
        help="how long a stage's forward, input gradients and weight gradients of a microbatch take, in any unit; "
        "default 1,1,1",
    )  # fmt: skip
    parser.add_argument("--send", type=_seconds, default=0.0, metavar="S", help="how long a message takes; default 0")
    parser.add_argument("--out", type=path_option, metavar="FILE", help="draw to a .svg, or a .png (needs mpitp[plot])")
    parser.add_argument("--json", action="store_true", help="all numbers, with every action's start and stop")


def run(args: argparse.Namespace) -> int:
    """Print the chart or its numbers, and draw it where that is asked for."""
    import shutil

    from mpitp.plan.schedule_report import make_report, words_of
    from mpitp.plan.text_chart import text_chart

    if args.out:
        from mpitp.plan.picture import check_picture, draw

        check_picture(Path(args.out))
    usual = 2 if args.schedule == "interleaved" else 1
    sizes = (args.pp, args.microbatches, usual if args.chunks is None else args.chunks)
    forward, input_grad, weight_grad = args.times
    report = make_report(args.schedule, sizes, Durations(forward, input_grad, weight_grad, args.send))
    if args.out:
        draw(report, Path(args.out))
    if args.json:
        print(json.dumps(report.as_dict()))
        return 0
    chart = text_chart(report.timeline, shutil.get_terminal_size().columns)
    print("\n".join([chart, "", *words_of(report)]))
    if args.out:
        print(f"drawn: {args.out}")
    return 0


def _seconds(word: str) -> float:
    """A time in any unit."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e100:  # also what isn't a number
        raise argparse.ArgumentTypeError(f"{word!r} is no time: expected a number from 0 up")
    return value


def _times(words: str) -> tuple[float, float, float]:
    """Three times, of which one at least isn't 0."""
    values = [_seconds(word) for word in words.split(",")]
    if len(values) != 3 or not sum(values):
        raise argparse.ArgumentTypeError(
            f"{words!r} has {len(values)} times with a sum of {sum(values):g}, expected three with a sum above 0: "
            "forward, input gradients and weight gradients, as 1,1,1"
        )
    return values[0], values[1], values[2]
