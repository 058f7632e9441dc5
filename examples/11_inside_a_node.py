"""11  Why tensor parallelism stays inside a node: the time on the wire against the work between two all-reduces.

    work   72 t h^2 / p flops a block and step (6 a weight and token, 12 h^2 weights)
    wire   4 all-reduces of t h numbers, each  latency + 2 (p - 1) / p * bytes / bandwidth

Their ratio doesn't depend on t: longer batches don't help. `Network` lets the real block run over a slower link: it
reduces as the group does, then waits as long as that link would need.

    python examples/11_inside_a_node.py plot.png        also draws the curve (needs matplotlib)
"""

import math
import sys
import time

import numpy as np
from course import exercise, nbytes, on_ranks, say

from mpitp.comm import Group
from mpitp.comm.observed import GroupObserver, ObservedGroup
from mpitp.layers import Builder, Pass, Rows, TransformerBlock, init_params, make_site
from mpitp.models import config_from_hf
from mpitp.models.gpt2 import build_block

RANKS = 2
TOKENS, HIDDEN = 256, 256
LINKS = {"this node": (0, math.inf), "10 Gbit/s": (20e-6, 1.25e9), "1 Gbit/s": (50e-6, 0.125e9)}  # s, bytes/s


class Network(GroupObserver):
    """Lets a group be no faster than a link with this latency and bandwidth."""

    def __init__(self, ranks: int, latency: float, bandwidth: float) -> None:
        self.latency, self.per_byte, self.waited = latency, 2 * (ranks - 1) / ranks / bandwidth, 0.0

    def around_collective(self, call, arrays, group, run):
        result, started = run(), time.perf_counter()
        if self.latency and not call.op.startswith("wait"):
            time.sleep(self.latency + self.per_byte * nbytes(call))
            self.waited += time.perf_counter() - started
        return result


def clock(group: Group, work) -> float:
    """Seconds of the slowest rank."""
    group.barrier()
    started = time.perf_counter()
    work()
    return float(group.all_reduce(np.array([time.perf_counter() - started]), op="max")[0])


def make_block(group: Group) -> TransformerBlock:
    raw = {"model_type": "gpt2", "n_embd": HIDDEN, "n_head": 8, "n_layer": 1}
    block = build_block(config_from_hf(raw), Builder(make_site(group), 0.02), 0, None)
    init_params(block.params().items(), seed=11)
    return block


def main(group: Group) -> None:
    sizes = [1 << i for i in range(10, 24, 2)]
    times = [min(clock(group, lambda n=n: group.all_reduce(np.ones(n // 4))) for _ in range(9)) for n in sizes]
    say(group, f"all-reduce on {group.size} ranks of this machine; ten marks are a factor of ten")
    for size, seconds in zip(sizes, times, strict=True):
        bar = "#" * max(1, round(10 * math.log10(seconds * 1e6)))
        say(group, f"{size // 1024:>7} KiB {seconds * 1e6:>9.0f} us {bar}")
    if group.rank == 0 and len(sys.argv) > 1:
        import matplotlib.pyplot as plt  # pip install -e ".[mpich,plot]"

        plt.loglog(sizes, times, "o-")
        plt.gca().set(xlabel="bytes", ylabel="seconds", title=f"all-reduce on {group.size} ranks")
        plt.savefig(sys.argv[1])

    x, run = np.ones((TOKENS, HIDDEN), np.float32), Pass(Rows.of((64,) * (TOKENS // 64)))
    say(group, f"\na block (h {HIDDEN}, t {TOKENS}), forward and backward on {group.size} ranks, over")
    networks = {name: Network(group.size, *link) for name, link in LINKS.items()}
    blocks = {name: make_block(ObservedGroup(group, network)) for name, network in networks.items()}
    works, wires = [], {name: math.inf for name in LINKS}
    for _ in range(7):  # in turns, so that all see the same machine; the least is what other programs haven't stretched
        for name, block in blocks.items():
            networks[name].waited = 0.0
            works.append(clock(group, lambda b=block: b.backward(x, b.forward(x, run)[1])) - networks[name].waited)
            wires[name] = min(wires[name], networks[name].waited)
    for name, network in networks.items():
        formula = 4 * (network.latency + network.per_byte * 4 * TOKENS * HIDDEN)
        say(group, f"  {name:<12}{(min(works) + wires[name]) * 1e3:8.1f} ms, of which on the wire"
                   f"{wires[name] * 1e3:6.1f} ms (by the formula {formula * 1e3:.1f})")  # fmt: skip
        assert wires[name] >= formula
    say(group, "PROOF  no step was shorter on the wire than by the formula")

    say(group, "\n8 GPUs of 400 Tflop/s, h 8192, 2-byte numbers: how much of the time on the wire")
    for name, bandwidth in (("NVLink in a node, 450 GB/s", 450e9), ("a network, 50 GB/s a GPU", 50e9)):
        wire, work = 4 * (2 * 7 / 8) * 2 * 8192 / bandwidth, 72 * 8192**2 / 8 / 400e12  # of one token
        say(group, f"  {name:<28}{wire / (wire + work):6.0%}")
    exercise(group, "Halve HIDDEN. By how much will the work shrink, and the wire? Predict the lines, then run.")


if __name__ == "__main__":
    on_ranks(main, RANKS)
