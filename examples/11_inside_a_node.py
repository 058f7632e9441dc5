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
from course import Watched, exercise, nbytes, on_ranks, say

from mpitp.backend.device import CpuDevice
from mpitp.comm import Group
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.init import init_params
from mpitp.layers.layout import Layout
from mpitp.layers.sequences import Sequences
from mpitp.models import config_from_hf
from mpitp.models.gpt2 import build_block

RANKS = 2
TOKENS, HIDDEN = 256, 256
LINKS = {"this node": (0, math.inf), "10 Gbit/s": (20e-6, 1.25e9), "1 Gbit/s": (50e-6, 0.125e9)}  # s, bytes/s


class Network(Watched):
    """The group, but no faster than a link with this latency and bandwidth."""

    def __init__(self, inner: Group, latency: float, bandwidth: float) -> None:
        super().__init__(inner)
        self.latency, self.per_byte = latency, 2 * (inner.size - 1) / inner.size / bandwidth

    def _around(self, call, run):
        result = run()
        time.sleep(0 if call.op.startswith("wait") else self.latency + self.per_byte * nbytes(call))
        return result


def clock(group: Group, work) -> float:
    """Seconds of the slowest rank."""
    group.barrier()
    started = time.perf_counter()
    work()
    return float(group.all_reduce(np.array([time.perf_counter() - started]), op="max")[0])


def make_block(group: Group) -> TransformerBlock:
    raw = {"model_type": "gpt2", "n_embd": HIDDEN, "n_head": 8, "n_layer": 1}
    block = build_block(config_from_hf(raw), Builder(Layout(group), CpuDevice(), np.float32, 0.02), 0)
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

    x, seqs = np.ones((TOKENS, HIDDEN), np.float32), Sequences((64,) * (TOKENS // 64))
    say(group, f"\na block (h {HIDDEN}, t {TOKENS}), forward and backward on {group.size} ranks, over")
    networks = {name: Network(group, *link) for name, link in LINKS.items()}
    blocks = {name: make_block(network) for name, network in networks.items()}
    steps = {name: math.inf for name in LINKS}
    for _ in range(7):  # in turns, so that all see the same machine
        for name, block in blocks.items():
            steps[name] = min(steps[name], clock(group, lambda b=block: b.backward(x, b.forward(x, seqs)[1])))
    for name, network in networks.items():
        wire = 4 * (network.latency + network.per_byte * 4 * TOKENS * HIDDEN)
        say(group, f"  {name:<12}{steps[name] * 1e3:8.1f} ms; on the wire by the formula {wire * 1e3:6.1f} ms")
        assert steps[name] >= wire
    say(group, "PROOF  no step was shorter than its time on the wire")

    say(group, "\n8 GPUs of 400 Tflop/s, h 8192, 2-byte numbers: how much of the time on the wire")
    for name, bandwidth in (("NVLink in a node, 450 GB/s", 450e9), ("a network, 50 GB/s a GPU", 50e9)):
        wire, work = 4 * (2 * 7 / 8) * 2 * 8192 / bandwidth, 72 * 8192**2 / 8 / 400e12  # of one token
        say(group, f"  {name:<28}{wire / (wire + work):6.0%}")
    exercise(group, "Halve HIDDEN. By how much will the work shrink, and the wire? Predict the lines, then run.")


if __name__ == "__main__":
    on_ranks(main, RANKS)
