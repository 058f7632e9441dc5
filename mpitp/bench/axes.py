"""`mpitp bench axes`: one step of one model, all ranks along tp, along pp, or along dp, and what the bytes of each say.

Every step takes the same microbatches: along tp and pp all ranks work on each of them, along dp each rank has its
share. In turn with them one rank alone does the whole step. A layout would take

    work = seconds alone / ranks / (1 - bubble)     and     bytes = what the textbook algorithms send from a rank / rate

where the rate is that of a large message between the first rank and the last, measured beforehand. Measured between
`work` and `work + bytes`, the bytes are hidden behind the work in part.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.bench.against import Peer, free_port
from mpitp.bench.machine import machine_facts
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of, describe
from mpitp.bench.timing import CLOCKS, Samples, Task, clocked, take_turns
from mpitp.bench.train import batch_to_time, num_params
from mpitp.comm.group import Group
from mpitp.comm.mesh import make_mesh
from mpitp.comm.serial import SerialGroup
from mpitp.errors import UsageError
from mpitp.layers.gathered import deal_weights
from mpitp.layers.site import make_site
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.registry import abstract_model
from mpitp.models.runner import PlainRunner, Runner
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import InBuckets, Reduction
from mpitp.pipeline.runner import PipelineRunner
from mpitp.pipeline.schedules import make_schedule
from mpitp.pipeline.simulate import simulate
from mpitp.trace.ledger import sent_from
from mpitp.trace.tracer import Tracer
from mpitp.train.step import TrainStep

ALONE = "one rank"
FORMS = ("tp", "ddp", "fsdp", "pp")  # of the peer
_MESSAGE_BYTES, _MESSAGES = 4 << 20, 4


@dataclass(frozen=True, slots=True)
class Layout:
    """All ranks along `axis`. `schedule`: of stages; `zero`: of replicas."""

    axis: str
    schedule: str = "1f1b"
    zero: int = 0


LAYOUTS = {
    "tp": Layout("tp"),
    "pp 1f1b": Layout("pp"),
    "pp zb": Layout("pp", "zb"),
    "dp": Layout("dp"),
    "dp zero 3": Layout("dp", zero=3),
}


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    if group.size < 2:
        raise UsageError("an axis has several ranks, and this is a job of 1; mpitp launch -n 2 -- bench axes")
    if args.microbatches % group.size:
        raise UsageError(f"--microbatches {args.microbatches} can't be dealt evenly to {group.size} ranks")
    config = config_of(args, args.model, max_positions=args.seq)
    batches = [batch_to_time(config, args.batch, args.seq)] * args.microbatches
    rate = message_rate(group)
    sent = {name: _sent_bytes(config, layout, group, args.dtype, batches) for name, layout in LAYOUTS.items()}
    steps = {name: _step(config, layout, group, args.dtype, batches) for name, layout in LAYOUTS.items()}
    alone = _step(config, Layout("tp"), SerialGroup(), args.dtype, batches)
    steps[ALONE] = alone if group.rank == 0 else lambda: None
    tasks: dict[str, Task] = {name: clocked(step, CLOCKS["wall"]) for name, step in steps.items()}
    with _peers(args, config, group) as (peers, version):
        samples = take_turns({**tasks, **peers}, args.rounds, group, "bench axes")
    work = {name: _work(samples, layout, group.size, args.microbatches) for name, layout in LAYOUTS.items()}
    return {
        "machine": machine_facts(group),
        "model": describe(config, num_params(abstract_model(config, make_site(SerialGroup())))),
        "microbatches": args.microbatches,
        "tokens_per_microbatch": args.batch * args.seq,
        "rounds": args.rounds,
        "bytes_a_second": rate,
        "alone_seconds": {"least": samples.least(ALONE), "median": samples.median(ALONE)},
        "layouts": {name: _numbers(samples, name, work[name], sent[name], rate) for name in LAYOUTS},
        "torch": version,
        "peers": {name: _peer_numbers(samples, name) for name in peers},
    }


def message_rate(group: Group) -> float:
    """Bytes a second of large messages from the first rank to the last and back, the quickest of some; on all ranks."""
    last, best = group.size - 1, np.array([np.inf])
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    for _ in range(_MESSAGES):
        group.barrier()
        started = time.perf_counter()
        if group.rank == 0:
            group.send(message, last)
            group.recv(message, last)
            best = np.minimum(best, time.perf_counter() - started)
        elif group.rank == last:
            group.recv(message, 0)
            group.send(message, 0)
    return 2 * _MESSAGE_BYTES / float(group.broadcast(best)[0])


def _train_step(config: DecoderConfig, layout: Layout, group: Group, dtype: str, tracer: Tracer | None) -> TrainStep:
    mesh = make_mesh(group, {layout.axis: group.size} if layout.axis == "tp" else {layout.axis: group.size, "tp": 1})
    model = random_model(config, make_site(mesh, dtype=dtype))
    if layout.zero == 3:
        deal_weights(model.layers, mesh)
    reduction: Reduction = WithDealtWeights(model) if layout.zero == 3 else InBuckets(model, layout.zero)
    runner: Runner = PlainRunner(model, reduction)
    if mesh.sizes["pp"] > 1:
        runner = PipelineRunner(model, layout.schedule, reduction)
    if tracer is not None:
        tracer.attach(model)
    optimizer = AdamW(reduction.params, AdamWSettings())
    return TrainStep(model, optimizer, clip_norm=1.0, runner=runner, reduction=reduction)


def _own(layout: Layout, group: Group, batches: list[Batch]) -> list[Batch]:
    """This rank's microbatches."""
    return batches[group.rank :: group.size] if layout.axis == "dp" else batches


def _step(config: DecoderConfig, layout: Layout, group: Group, dtype: str, batches: list[Batch]) -> Callable[[], Any]:
    step, own = _train_step(config, layout, group, dtype, None), _own(layout, group, batches)
    return lambda: step(own, lr=1e-5)


def _sent_bytes(config: DecoderConfig, layout: Layout, group: Group, dtype: str, batches: list[Batch]) -> float:
    """What the textbook algorithms send from the rank that sends most in a step, by the calls of one; a collective."""
    tracer = Tracer()
    step = _train_step(config, layout, tracer.watch(group), dtype, tracer)
    step(_own(layout, group, batches), lr=1e-5)
    return float(group.all_reduce(np.array([sent_from(tracer.traffic, group.size)]), op="max")[0])


def _work(samples: Samples, layout: Layout, ranks: int, microbatches: int) -> float:
    """Seconds of the step if nothing were sent."""
    bubble = 0.0
    if layout.axis == "pp":
        bubble = simulate(make_schedule(layout.schedule, ranks, microbatches)).bubble
    return samples.least(ALONE) / ranks / (1 - bubble)


def _numbers(samples: Samples, name: str, work: float, sent: float, rate: float) -> dict[str, Any]:
    least, median = samples.ratio("tp", name)
    return {
        "seconds": {"least": samples.least(name), "median": samples.median(name)},
        "work_seconds": work,
        "sent_bytes": sent,
        "sent_seconds": sent / rate,
        "times_tp": {"least": least, "median": median},
    }


_OURS = {"tp": "tp", "ddp": "dp", "fsdp": "dp zero 3", "pp": "pp 1f1b"}  # beside which of ours a peer's form is told


def _peer_numbers(samples: Samples, name: str) -> dict[str, Any]:
    ours = _OURS[name.removeprefix("torch, ")]
    least, median = samples.ratio(name, ours)
    seconds = {"least": samples.least(name), "median": samples.median(name)}
    return {"seconds": seconds, "beside": ours, "ours_is_times": {"least": least, "median": median}}


@contextlib.contextmanager
def _peers(args: argparse.Namespace, config: DecoderConfig, group: Group) -> Iterator[tuple[Mapping[str, Task], str]]:
    """Tasks "torch, FORM": every rank has a process of the peer beside it, and sleeps while that runs a step."""
    if args.against is None:
        yield {}, ""
        return
    _check_sizes(config, group.size)
    names = ("model_type", "num_layers", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab_size")
    told = ("model", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    settings = {word: getattr(config, name) for word, name in zip(told, names, strict=True)}
    settings |= {"batch": args.batch, "seq": args.seq, "microbatches": args.microbatches, "address": _address(group)}
    with contextlib.ExitStack() as stack:
        peers = {}
        for form in FORMS:
            place = group.rank, int(group.broadcast_object(free_port()))
            peers[form] = Peer(args.peer_python, "torch_axes.py", {**settings, "form": form}, group.size, place)
            stack.callback(peers[form].end)
        yield {f"torch, {form}": _asking(peer) for form, peer in peers.items()}, peers["tp"].version


def _asking(peer: Peer) -> Task:
    return lambda: float(peer.ask("step")["seconds"])


def _check_sizes(config: DecoderConfig, ranks: int) -> None:
    sizes = {
        "heads": config.heads,
        "KV heads": config.kv_heads,
        "FFN": config.ffn_hidden,
        "vocabulary": config.vocab_size,
    }
    if uneven := [f"{name} {size}" for name, size in sizes.items() if size % ranks]:
        raise UsageError(f"PyTorch's tensor parallelism needs sizes that {ranks} ranks divide; not {', '.join(uneven)}")


def _address(group: Group) -> str:
    """Where the peer's ranks meet: at the first rank's host."""
    hosts = group.all_gather_objects(socket.gethostname())
    return "127.0.0.1" if len(set(hosts)) == 1 else socket.gethostbyname(hosts[0])


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    alone = facts["alone_seconds"]
    lines = [
        facts["model"],
        f"a step of {facts['microbatches']} microbatches of {facts['tokens_per_microbatch']} tokens; {facts['rounds']} "
        f"rounds, in turn; a large message goes at {facts['bytes_a_second'] / 1e6:.0f} MB/s",
        "",
        f"{'all ranks along':18}{'least s':>9}{'median s':>10}{'work s':>9}{'sent MB':>9}{'bytes s':>9}{'sum s':>9}"
        f"{'times tp (least, median)':>27}",
        f"{ALONE:18}{alone['least']:9.3f}{alone['median']:10.3f}",
    ]
    for name, found in facts["layouts"].items():
        seconds, work, sent = found["seconds"], found["work_seconds"], found["sent_seconds"]
        lines.append(
            f"{name:18}{seconds['least']:9.3f}{seconds['median']:10.3f}{work:9.3f}{found['sent_bytes'] / 1e6:9.2f}"
            f"{sent:9.3f}{work + sent:9.3f}{found['times_tp']['least']:18.2f}{found['times_tp']['median']:9.2f}"
        )
    if facts["peers"]:
        lines += ["", f"PyTorch {facts['torch']} over gloo, one thread a rank, in turn with ours:"]
    for name, found in facts["peers"].items():
        seconds, times = found["seconds"], found["ours_is_times"]
        lines.append(
            f"{name:18}{seconds['least']:9.3f}{seconds['median']:10.3f}   ours ({found['beside']}) is "
            f"{times['least']:.2f} times as fast (least by least), {times['median']:.2f} (median of paired ratios)"
        )
    return lines
