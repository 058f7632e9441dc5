"""What `mpitp bench` can measure: of each the words of its help, its options, and what these can't be."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpitp.bench.sizes import add_size_arguments, positive
from mpitp.errors import UsageError
from mpitp.paths import path_option

_TRAIN = """\
Time optimizer steps (forward, backward, gradient norm, clipping, AdamW) on random tokens, and in turn with them the
step's own matrix products alone: the floor under the step. Prints both, their ratio, tokens/s, where a step's time goes
(from extra steps, the timed ones run untouched), and the bytes that it communicates against the closed form. On several
ranks also how much of the communication is hidden behind other work, and the step with every sum waited for at once."""

_DECODE = """\
Time generation (greedy, through the product's own loop) and in turn with it the products of all weights with one
vector each: a token of one text needs every weight once, so reading them is its bound. With --batch N, N texts together
too. Without --model DIR a random model of the sizes given; they default to those of SmolLM2-135M."""

_SERVE = """\
Time one text on the bare engine, in turn with it N texts together, and the same N asked for over HTTP (each a stream to
a client in another process): what company gains, and what the server costs. Needs mpitp[serve]. Without --model DIR a
random model of the sizes given; they default to those of SmolLM2-135M."""

_ALLREDUCE = """\
Time an all-reduce of float32 (or a reduce-scatter, or an all-gather) at sizes from 1 KiB up, the ways to do it in turn:
the MPI library's, the shared-memory window with the operand produced there, the window with an operand that is copied
in, and over nodes the hierarchical one. --ranks-per-node cuts the ranks of one machine into simulated nodes."""

_SAVE = """\
Time a checkpoint (weights and both moments of a random Llama-type model) and in turn with it plain sequential writes of
as many bytes to the same disk; and how long a step stands still for a save in the background, against a copy of the
state alone. Needs room for three copies of the state in --dir, and memory for two."""

_SCALING = """\
Time training steps of several widths, sequence lengths and batches, each at 1, 2, 4, ... of the job's ranks, and fit
seconds = compute + memory + overhead + latency + bytes / bandwidth to all of them: what a step of another size on other
ranks will take, and what bounds it."""

_REPLICAS = """\
Time optimizer steps of data-parallel replicas, without and with ZeRO 1, 2 and 3, and in turn with them a step of every
rank by itself at the same time, and of one rank alone: N replicas can at best be N times as fast as one."""

_SHARES = """\
Time a step along tp whose last rank is slowed (stopped and let go by turns of milliseconds), dealt evenly and, in turn
with that, by the ranks' measured speeds ([mesh] shares = "measured"). The losses of both are those of the same run."""

_PIPELINE = """\
Time the passes of a step (forward and backward of its microbatches) through a pipeline with a stage on each rank, by
several schedules, and in turn with them one rank alone. A perfect pipeline of p stages takes the one rank's time / p /
(1 - bubble); the bubble's share is that of `mpitp plan schedule`, where forward, input and weight gradients take the
same time."""

_MACHINE = """\
Measure what a plan needs to know of a machine: products by shape, passes over memory, exponentials, the optimizer, sums
by size and group (inside a node, and between nodes where there are several), sends, what of a sum runs behind products,
and the start of an operation and of a step; all in turn, the least time counts. Start it on as many ranks as a job has
on a node, and on several nodes where a job has several."""

_AXES = """\
Time one step of one model with all ranks along tp, along pp (1F1B, zero-bubble) and along dp (whole weights, ZeRO-3),
and in turn with them one rank alone; beside each its share of the work, the bytes that it sends and how long these take
at the rate of a large message. With --against torch also PyTorch's tensor parallelism, DDP, FSDP2 and pipelining."""

_TYPES = """\
Time optimizer steps of each type of decoder, encoder and encoder-decoder on one rank, all of the same sizes, and in
turn with each its own matrix products: what norms, activations, caps and biases of a type add to them. The dearest type
comes first."""

_EXPERTS = """\
Time optimizer steps of a mixture of experts on random tokens, and in turn with them the matrix products of these tokens
as they are routed: as many rows as each expert really has. On several ranks the experts are dealt over all of them (ep)
and each rank has tokens of its own; then also the passes alone, with every exchange of rows waited for, and
the bytes exchanged against the closed form. scripts/bench_hosts -- experts runs it over a slow link."""

_SCALING_SIZES = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 2048}
_REPLICAS_SIZES = {"layers": 4, "hidden": 384, "heads": 6, "vocab": 4096}
_SHARES_SIZES = {"layers": 4, "hidden": 512, "heads": 12, "head-dim": 64, "vocab": 8192}
_SAVE_SIZES = {"layers": 10, "hidden": 640, "heads": 10, "vocab": 16384}
_TRAIN_SIZES = {"layers": 6, "hidden": 512, "heads": 8, "vocab": 8192}
_AXES_SIZES = {"layers": 4, "hidden": 384, "heads": 6, "vocab": 2048}
_TYPES_SIZES = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 4096}
_EXPERTS_SIZES = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 512, "vocab": 2048}
_PIPELINE_SIZES = {"layers": 8, "hidden": 384, "heads": 6, "vocab": 512}
_DECODE_SIZES = {"layers": 30, "hidden": 576, "heads": 9, "kv-heads": 3, "head-dim": 64, "ffn": 1536, "vocab": 49152}


def _check_sizes(args: argparse.Namespace, *names: str) -> None:
    """Sizes of a model, and these options, are at least 1."""
    positive(args, "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn", "vocab", *names)


def _add_clock(sub: argparse.ArgumentParser) -> None:
    text = "cpu: the process's own seconds, for a busy machine (one rank, one BLAS thread); default wall"
    sub.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=text)


def _add_plot(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--plot", type=path_option, metavar="FILE", help="also draw the numbers (.png, .svg, .pdf); needs mpitp[plot]"
    )


def _add_train(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", choices=("gpt2", "llama"), default="gpt2", help="default gpt2")
    add_size_arguments(sub, _TRAIN_SIZES)
    sub.add_argument("--batch", type=int, default=8, metavar="N", help="sequences a step; default 8")
    sub.add_argument("--seq", type=int, default=256, metavar="N", help="tokens a sequence; default 256")
    sub.add_argument("--steps", type=int, default=10, metavar="N", help="rounds to time; default 10")
    sub.add_argument(
        "--invariant", action="store_true", help="also time the invariant mode, in turn with the plain one"
    )
    sub.add_argument("--invariant-blocks", type=int, metavar="N", help="its number of blocks (default: the heads)")
    sub.add_argument(
        "--sequence-parallel", action="store_true", help="also time sequence parallelism, in turn with the plain step"
    )
    sub.add_argument(
        "--context-parallel",
        choices=("ring", "heads"),
        help="also time sequences cut over all ranks, in turn with one rank's step",
    )
    sub.add_argument(
        "--recompute",
        choices=("none", "attention", "full"),
        default="none",
        help="also a step that recomputes, in turn",
    )
    sub.add_argument(
        "--against",
        choices=("torch",),
        help="also PyTorch's tensor parallelism over gloo, in turn with ours, one BLAS thread a rank",
    )
    sub.add_argument(
        "--peer-python", type=path_option, metavar="PYTHON", help="the Python that has torch (with --against)"
    )
    _add_clock(sub)
    _add_plot(sub)


def _check_train(args: argparse.Namespace) -> None:
    _check_sizes(args, "batch", "seq", "steps", "invariant-blocks")
    if args.against and (not args.peer_python or args.clock != "wall" or args.dtype != "float32"):
        raise UsageError("--against needs --peer-python PYTHON, float32 and the wall clock")


def _add_types(sub: argparse.ArgumentParser) -> None:
    add_size_arguments(sub, _TYPES_SIZES, ("layers", "hidden", "heads", "ffn", "vocab"))
    sub.add_argument("--only", metavar="TYPE[,TYPE...]", help="these types; default: all without experts")
    sub.add_argument("--batch", type=int, default=4, metavar="N", help="sequences; default 4")
    sub.add_argument("--seq", type=int, default=256, metavar="N", help="tokens a sequence; default 256")
    sub.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds to time; default 7")
    _add_clock(sub)


def _add_decode(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model", type=path_option, metavar="DIR", help="a Hugging Face directory, instead of random weights"
    )
    add_size_arguments(sub, _DECODE_SIZES)
    sub.add_argument("--batch", type=int, default=1, metavar="N", help="also N texts together; default 1")
    sub.add_argument("--prompt", type=int, default=32, metavar="N", help="tokens of a prompt; default 32")
    sub.add_argument("--tokens", type=int, default=32, metavar="N", help="new tokens of a text; default 32")
    sub.add_argument(
        "--against",
        choices=("transformers",),
        help="also Hugging Face transformers on the same core, in turn with ours (needs --model DIR)",
    )
    sub.add_argument(
        "--peer-python", type=path_option, metavar="PYTHON", help="the Python that has transformers (with --against)"
    )
    sub.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds to time; default 5")
    _add_clock(sub)
    _add_plot(sub)


def _check_decode(args: argparse.Namespace) -> None:
    _check_sizes(args, "batch")
    if args.against and (not args.peer_python or args.clock != "wall" or args.dtype != "float32" or not args.model):
        raise UsageError("--against needs --peer-python PYTHON, --model DIR, float32 and the wall clock")
    positive(args, "prompt", "rounds")
    if args.tokens < 2:
        raise UsageError(f"--tokens must be at least 2 (the first one comes with the prompt), got {args.tokens}")


def _add_serve(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model", type=path_option, metavar="DIR", help="a Hugging Face directory, instead of random weights"
    )
    add_size_arguments(sub, _DECODE_SIZES)
    sub.add_argument("--texts", type=int, default=16, metavar="N", help="together; default 16")
    sub.add_argument("--prompt", type=int, default=32, metavar="N", help="tokens of a prompt; default 32")
    sub.add_argument("--tokens", type=int, default=32, metavar="N", help="new tokens of a text; default 32")
    sub.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds to time; default 3")


def _add_allreduce(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--max-bytes", type=int, default=64 * 2**20, metavar="N", help="the largest size; default 67108864"
    )
    sub.add_argument(
        "--collective", choices=("all-reduce", "reduce-scatter", "all-gather"), default="all-reduce", help="which one"
    )
    sub.add_argument("--ranks-per-node", type=int, metavar="N", help="also over simulated nodes of N ranks")
    text = (
        "also a group of your own, my.module:Class or file.py:Class, after a check that it gives what the library does"
    )
    sub.add_argument("--group", type=path_option, metavar="CLASS", help=text)
    _add_plot(sub)


def _check_allreduce(args: argparse.Namespace) -> None:
    if args.max_bytes < 1024:
        raise UsageError(f"--max-bytes must be at least 1024, got {args.max_bytes}")


def _add_scaling(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", choices=("gpt2", "llama"), default="gpt2", help="default gpt2")
    add_size_arguments(sub, _SCALING_SIZES)
    sub.add_argument("--seq", type=int, default=128, metavar="N", help="tokens a sequence; default 128")
    sub.add_argument("--batch", type=int, default=4, metavar="N", help="sequences a step; default 4")
    for name, default, what in (
        ("widths", [128, 512], "widths"),
        ("seqs", [64, 256], "sequence lengths"),
        ("batches", [2, 8], "batches"),
    ):
        told = f"further {what}; default {' '.join(map(str, default))}"
        sub.add_argument(f"--{name}", type=int, nargs="*", default=default, metavar="N", help=told)
    sub.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds to time; default 5")
    sub.add_argument("--out", type=path_option, metavar="FILE", help="write the table and the fit there, as JSON")
    _add_plot(sub)


def _check_scaling(args: argparse.Namespace) -> None:
    _check_sizes(args, "batch", "seq", "rounds")
    for name in ("widths", "seqs", "batches"):
        if min(getattr(args, name), default=1) < 1:
            raise UsageError(f"--{name} must be at least 1 each")


def _add_replicas(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", choices=("gpt2", "llama"), default="gpt2", help="default gpt2")
    add_size_arguments(sub, _REPLICAS_SIZES)
    sub.add_argument("--batch", type=int, default=4, metavar="N", help="sequences in a microbatch; default 4")
    sub.add_argument("--microbatches", type=int, default=2, metavar="N", help="of a rank in a step; default 2")
    sub.add_argument("--seq", type=int, default=256, metavar="N", help="tokens a sequence; default 256")
    sub.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds to time; default 10")


def _add_shares(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", choices=("gpt2", "llama"), default="llama", help="default llama")
    add_size_arguments(sub, _SHARES_SIZES)
    sub.add_argument("--slow", type=float, default=0.5, metavar="P", help="part of the time it runs; default 0.5")
    sub.add_argument("--batch", type=int, default=4, metavar="N", help="sequences in a step; default 4")
    sub.add_argument("--seq", type=int, default=256, metavar="N", help="tokens a sequence; default 256")
    sub.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds to time; default 10")


def _add_save(sub: argparse.ArgumentParser) -> None:
    add_size_arguments(sub, _SAVE_SIZES)
    sub.add_argument(
        "--dir",
        type=path_option,
        default=".",
        help="where to write (a folder of its own is made and removed); default .",
    )
    sub.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds to time; default 5")


def _add_pipeline(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", choices=("gpt2", "llama"), default="gpt2", help="default gpt2")
    add_size_arguments(sub, _PIPELINE_SIZES)
    sub.add_argument("--batch", type=int, default=2, metavar="N", help="sequences a microbatch; default 2")
    sub.add_argument("--seq", type=int, default=128, metavar="N", help="tokens a sequence; default 128")
    sub.add_argument("--microbatches", type=int, default=8, metavar="N", help="of a step; default 8")
    sub.add_argument(
        "--schedules", nargs="+", choices=("gpipe", "1f1b", "zb"), default=["1f1b", "zb"], help="default 1f1b zb"
    )
    sub.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds to time; default 7")


def _add_axes(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", choices=("gpt2", "llama"), default="gpt2", help="default gpt2")
    add_size_arguments(sub, _AXES_SIZES)
    sub.add_argument("--batch", type=int, default=2, metavar="N", help="sequences a microbatch; default 2")
    sub.add_argument("--seq", type=int, default=128, metavar="N", help="tokens a sequence; default 128")
    sub.add_argument("--microbatches", type=int, default=8, metavar="N", help="of a step; default 8")
    sub.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds to time; default 5")
    sub.add_argument("--against", choices=("torch",), help="also PyTorch over gloo, in turn with ours")
    sub.add_argument(
        "--peer-python", type=path_option, metavar="PYTHON", help="the Python that has torch (with --against)"
    )


def _check_axes(args: argparse.Namespace) -> None:
    _check_sizes(args, "batch", "seq", "rounds", "microbatches")
    if args.against and (not args.peer_python or args.dtype != "float32"):
        raise UsageError("--against needs --peer-python PYTHON and float32")


def _add_experts(sub: argparse.ArgumentParser) -> None:
    add_size_arguments(sub, _EXPERTS_SIZES)
    sub.add_argument("--experts", type=int, default=8, metavar="N", help="experts of a block; default 8")
    sub.add_argument("--top-k", type=int, default=2, metavar="N", help="that a token goes to; default 2")
    sub.add_argument("--shared", type=int, default=0, metavar="N", help="columns of a shared expert; default 0: none")
    sub.add_argument("--batch", type=int, default=8, metavar="N", help="sequences of a rank; default 8")
    sub.add_argument("--seq", type=int, default=256, metavar="N", help="tokens a sequence; default 256")
    sub.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds to time; default 10")
    _add_clock(sub)


def _add_machine(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", type=path_option, metavar="FILE", help="write the machine file there")
    sub.add_argument("--name", metavar="WORDS", help="what the machine is called; default its processor")
    sub.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long, about; default 60")
    sub.add_argument(
        "--dtype", action="append", choices=("float32", "float64", "bfloat16", "float16"), metavar="DTYPE",
        help="of products, may be given several times; default float32",
    )  # fmt: skip
    sub.add_argument(
        "--most-bytes", type=int, default=1 << 27, metavar="N", help="the largest array; default 134217728"
    )


def _check_machine(args: argparse.Namespace) -> None:
    if not 0 < args.seconds < 1e5:
        raise UsageError(f"--seconds must be above 0, and less than a day, got {args.seconds:g}")
    if args.most_bytes < 1 << 16:
        raise UsageError(f"--most-bytes must be at least {1 << 16}, got {args.most_bytes}")
    if args.out and not Path(args.out).resolve().parent.is_dir():
        raise UsageError(f"--out {args.out}: there is no folder {Path(args.out).resolve().parent}")


@dataclass(frozen=True, slots=True)
class Bench:
    """One thing to measure. `check(args)` raises UsageError; `module`, of mpitp.bench, measures and reports."""

    line: str
    description: str
    add: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None]
    module: str


def _least_1(*names: str) -> Callable[[argparse.Namespace], None]:
    return lambda args: _check_sizes(args, *names)


BENCHES = {
    "train": Bench("a training step against its matrix products", _TRAIN, _add_train, _check_train, "train"),
    "types": Bench(
        "the step of each type of model against its products",
        _TYPES,
        _add_types,
        _least_1("batch", "seq", "rounds"),
        "kinds",
    ),
    "decode": Bench("generation against reading the weights", _DECODE, _add_decode, _check_decode, "decode"),
    "serve": Bench(
        "many texts together against one, the server against the engine",
        _SERVE,
        _add_serve,
        _least_1("texts", "prompt", "tokens", "rounds"),
        "serve",
    ),
    "allreduce": Bench(
        "time and bandwidth of an all-reduce by size", _ALLREDUCE, _add_allreduce, _check_allreduce, "allreduce"
    ),
    "scaling": Bench(
        "steps of many sizes and rank counts, and a fit of their time",
        _SCALING,
        _add_scaling,
        _check_scaling,
        "scaling",
    ),
    "replicas": Bench(
        "data-parallel steps against ranks by themselves",
        _REPLICAS,
        _add_replicas,
        _least_1("batch", "seq", "rounds", "microbatches"),
        "replicas",
    ),
    "shares": Bench(
        "a slow rank with equal shares and with measured ones",
        _SHARES,
        _add_shares,
        _least_1("batch", "seq", "rounds"),
        "shares",
    ),
    "save": Bench("a checkpoint against plain writes to the same disk", _SAVE, _add_save, _least_1("rounds"), "save"),
    "pipeline": Bench(
        "pipeline schedules against what their bubbles allow",
        _PIPELINE,
        _add_pipeline,
        _least_1("batch", "seq", "rounds", "microbatches"),
        "pipeline",
    ),
    "axes": Bench("all ranks along one axis, beside what the bytes say", _AXES, _add_axes, _check_axes, "axes"),
    "experts": Bench(
        "a mixture of experts against the products of its tokens as routed",
        _EXPERTS,
        _add_experts,
        _least_1("batch", "seq", "rounds", "experts", "top-k"),
        "experts",
    ),
    "machine": Bench(
        "a machine in numbers, as the file that mpitp plan reads",
        _MACHINE,
        _add_machine,
        _check_machine,
        "measure_machine",
    ),
}
