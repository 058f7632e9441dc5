"""`mpitp verify`: is this layout's arithmetic the one-rank model's?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from mpitp.error_stream import ErrorStream, tell
from mpitp.errors import NumericError, UsageError
from mpitp.paths import path_option

if TYPE_CHECKING:
    from mpitp.backend.device import Device
    from mpitp.comm.group import Group
    from mpitp.models.layered import LayeredModel
    from mpitp.verify.compare import Tolerance
    from mpitp.verify.run import FiniteDifference, Report
    from mpitp.verify.source import Source, SourceArguments

_DESCRIPTION = """\
Run one forward and backward pass in the layout at hand and in the one-rank model, with the same weights and the same
batch, and compare layer by layer: outputs, gradients of activations, every parameter's gradient, the gradient norm and,
with --steps, the weights after optimizer steps. What is claimed to be equal on several ranks is compared to the bit.
With --config the layout is the whole of the run file's (every axis of [mesh], schedule, ZeRO, recompute): its first
microbatches are dealt to the ranks as in training, and what differs is placed along an axis of the mesh where it shows.
The batch ends with the first and the last id of every rank's rows of the vocabulary, as inputs and as targets.
An encoder with a decoder is given pairs of unequal lengths; what its cross attention makes of the source is compared
like the rest.
The table's order is the order of computation, so its first failure is where to look. Exit code 5 on a difference, and
when weights are NaN or infinite. On one rank the model is compared with itself: a layout needs several.

Before anything is computed, types are checked: along each axis of the mesh an array is invariant (I), replicate (R),
varying (V) or partial (P), every layer says what it takes and gives, and a sum that is forgotten, one too many or along
another axis, or a weight whose gradient nobody sums, is an error (exit code 3) that names layer and axis. --types does
only that, for any number of ranks. At run time the comparison then holds the layers to what their types claim.

What this can't tell: a mistake that the layout and the one-rank model make alike (--finite-differences finds wrong
gradients of a forward pass, not a wrong forward pass); for that, --against-reference compares with another program."""

_EPILOG = """\
examples:
  mpitp launch -n 3 -- verify --model models/smollm2-135m
  mpitp launch -n 2 -- verify --config run.toml --dtype float64 --steps 3 --finite-differences 20
  mpitp launch -n 8 -- verify --config run.toml --set mesh.dp=2 --set mesh.pp=2 --steps 2
  mpitp launch -n 4 -- verify --model DIR --invariant        must be equal to the last bit
  mpitp launch -n 4 -- verify --model DIR --layers 0:4       when the model doesn't fit twice
  mpitp launch -n 2 -- verify --model DIR --against-reference ref.npz --dtype float64
  mpitp verify --types --config run.toml --ranks 4096        do the layers fit one another? alone, in no time

float64 tells rounding (1e-15) from mistakes most sharply; in float32 rounding reaches 4e-5 in a model of 30 layers."""

# What rounding really gives in float32, measured on 2 and 3 ranks: 1.3e-6 in random models of 2 to 6 layers, 4e-5 in a
# trained one of 30 (SmolLM2-135M, on random tokens); changes of weights, 6e-4. Five times that is allowed. In float64
# all of it is 5e8 times smaller.
_TOLERANCES = {"float64": (1e-11, 1e-9), "float32": (2e-4, 3e-3)}
_FLOOR = 1e-4

_ALONE = (
    "mpitp verify: on one rank the model is compared with itself; to check a layout, start the same on several: "
    "mpitp launch -n 2 -- verify ..."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp verify`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", type=path_option, metavar="DIR", help="a Hugging Face directory; the batch is random"
    )
    source.add_argument("--config", type=path_option, metavar="RUN.TOML", help="a run file; the batch is its first one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of the run file")
    parser.add_argument("--layers", metavar="A:B", help="only the blocks A to B-1")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences (with --model); default 2")
    parser.add_argument(
        "--seq", type=int, metavar="N", help="tokens a sequence (with --model); default 16, or all positions"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of the random batch (with --model)")
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="also take N AdamW steps, compare the weights"
    )
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="to compute in")
    parser.add_argument("--tolerance", type=float, metavar="X", help="relative to an array's largest magnitude")
    parser.add_argument("--finite-differences", type=int, default=0, metavar="K", help="check K gradients numerically")
    parser.add_argument(
        "--against-reference",
        type=path_option,
        metavar="REF.NPZ",
        help="compare with outputs that another program saved (scripts/save_reference.py), not with the one-rank model",
    )
    parser.add_argument("--invariant", action="store_true", help="invariant mode: nothing may differ by a single bit")
    parser.add_argument("--invariant-blocks", type=int, default=0, metavar="B", help="how many blocks (0: chosen)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")
    parser.add_argument("--failures-only", action="store_true", help="leave the lines that are equal out of the table")
    parser.add_argument(
        "--types", action="store_true", help="only check that layers fit one another; computes and allocates nothing"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="with --types: of a job that isn't started; default 2")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Verify; every rank runs this, rank 0 reports."""
    _check(args)
    if args.types:
        return _run_types(args)
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.verify import report as reports
    from mpitp.verify.source import source_facts

    group, device = start_job(args.device)
    agree(group, lambda: call_facts("verify", args, ["model", "config", "set"]) | source_facts(args))
    report, checks = _compared(args, group, device)
    ok = group.broadcast_object(report.ok and all(check.ok for check in checks))
    if group.size == 1 and not args.against_reference:
        print(_ALONE, file=ErrorStream())
    if group.rank == 0:
        if args.json:
            print(json.dumps(reports.as_dict(report, checks, group.size)))
        else:
            print(reports.text(report, checks, group.size, failures_only=args.failures_only), flush=True)
    return 0 if ok else NumericError.exit_code


def _compared(args: argparse.Namespace, group: Group, device: Device) -> tuple[Report, list[FiniteDifference]]:
    """What the arguments ask for; complete on rank 0."""
    from mpitp.backend.threads import limit_blas_threads
    from mpitp.verify.batches import with_edges
    from mpitp.verify.run import Settings, finite_differences, verify
    from mpitp.verify.source import available_bytes, check_memory, source_of

    source, make_batches = source_of(_source_arguments(args), group)
    site = source.site(group, device)
    if source.invariant_blocks:  # it may be the run file that asks for it
        limit_blas_threads(1)
    if group.rank == 0:
        tell([*source.notices, *source.model.config.notices])
    batches, tolerance = make_batches(), _tolerance(args, source)
    samples = 1 + max(run.sample for batch in batches for run in batch.rows.runs)
    weights = site.mesh.weights("tp")
    batches[0] = with_edges(batches[0], source.model.config, source.invariant_blocks, site.tp.size, samples, weights)
    if args.against_reference:
        report = _against_reference(group, source.make(site), args.against_reference, tolerance)
    else:
        shares = site.tp.size * site.mesh.sizes["pp"]
        check_memory(source, shares, args.steps, group.broadcast_object(available_bytes()))
        report = verify(site, source.make, batches, Settings(tolerance, args.steps), source.step)
    checks: list[FiniteDifference] = []
    if args.finite_differences:
        checks = finite_differences(source.make(site), batches, args.finite_differences, make_step=source.step)
    return report, checks


def _against_reference(group: Group, model: LayeredModel, path: str, tolerance: Tolerance) -> Report:
    from mpitp.checkpoint.together import together
    from mpitp.models.model import CausalLM
    from mpitp.verify.reference import compare_with_reference, read_reference
    from mpitp.verify.run import Report

    if not isinstance(model, CausalLM):
        raise UsageError("--against-reference compares models that continue text; leave it out with an encoder")

    reference = together(group, lambda: read_reference(path))
    return Report(compare_with_reference(group, model, reference, tolerance), path)


def _tolerance(args: argparse.Namespace, source: Source) -> Tolerance:
    from mpitp.verify.compare import Tolerance

    if args.tolerance is not None:
        return Tolerance(args.tolerance, args.tolerance, _FLOOR)
    return default_tolerance(args.dtype, is_exact=bool(source.invariant_blocks))


def _run_types(args: argparse.Namespace) -> int:
    """Check the types alone, on a mesh without processes."""
    from mpitp.verify.source import source_of
    from mpitp.verify.types import as_dict, as_text, check_types

    ranks = 2 if args.ranks is None else args.ranks
    source, _ = source_of(_source_arguments(args), ranks)
    tell(source.notices)
    rows = check_types(source, source.sizes(ranks))
    print(json.dumps(as_dict(rows, ranks)) if args.json else as_text(rows, ranks))
    return 0


def default_tolerance(dtype: str, *, is_exact: bool) -> Tolerance:
    """What rounding may make of a comparison in `dtype`; `is_exact`: nothing."""
    from mpitp.verify.compare import EXACT, Tolerance

    return EXACT if is_exact else Tolerance(*_TOLERANCES[dtype], _FLOOR)


def _check(args: argparse.Namespace) -> None:
    for name in ("steps", "finite_differences", "invariant_blocks"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(args, name)}")
    if args.finite_differences and args.dtype != "float64":
        raise UsageError("--finite-differences needs --dtype float64: in float32 the differences drown in rounding")
    if args.tolerance is not None and not 0 <= args.tolerance < float("inf"):
        raise UsageError(f"--tolerance must be a number of at least 0, got {args.tolerance}")
    if args.ranks is not None and not (args.types and args.ranks >= 1):
        raise UsageError(
            f"--ranks {args.ranks} goes with --types, as a number of at least 1; else the job's own ranks count: "
            "mpitp launch -n N -- verify"
        )
    if args.set and args.config is None:
        raise UsageError("--set replaces keys of a run file; it goes with --config")
    for name in ("batch", "seq", "seed"):
        if args.config is not None and getattr(args, name) is not None:
            raise UsageError(
                f"--{name} is of the random batch of --model; with --config the batch is the run's first one"
            )


def _source_arguments(args: argparse.Namespace) -> SourceArguments:
    from mpitp.verify.source import SourceArguments

    return SourceArguments(
        model=args.model,
        run_file=args.config,
        overrides=tuple(args.set),
        layers=args.layers,
        batch=2 if args.batch is None else args.batch,
        seq=args.seq,
        seed=args.seed or 0,
        dtype=args.dtype,
        invariant=args.invariant,
        invariant_blocks=args.invariant_blocks,
    )
