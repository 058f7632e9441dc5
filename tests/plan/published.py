"""Machines and models of the papers on Megatron-LM, from what these and data sheets say.

V100: DGX-2H, 16 GPUs a node, 900 GB/s of memory, NVSwitch of 300 GB/s (150 each way). A100: Selene, 8 GPUs of 80 GB a
node, 312 Tflop/s in bfloat16, 2.0 TB/s of memory, NVSwitch of 600 GB/s (300 each way), eight 200 Gbit/s links a node.
An all-reduce over p ranks takes a ring's time, 2 (p-1)/p n / bandwidth. The rate of products is the one number that
no data sheet has: each test takes it from one published figure, and foretells the others.
"""

from __future__ import annotations

from typing import Any

from mpitp.models.config import DecoderConfig
from mpitp.models.registry import config_from_hf
from mpitp.plan.anatomy import Anatomy, Facts
from mpitp.plan.cost import Step
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine, machine_from
from mpitp.plan.simulate import StepSimulator

VOCAB = 51200


def ring(bandwidth: float, counts: tuple[int, ...]) -> list[list[float]]:
    return [[p, 1e6, bandwidth * p / (2 * (p - 1))] for p in counts]


def v100(rate: float) -> Machine:
    return _machine("float16", rate, 16, (900e9, 150e9, (2, 4, 8, 16)))


def a100(rate: float) -> Machine:
    wide = {"latency_seconds": 1e-5, "sums": ring(25e9, (2, 4, 8, 16, 32, 64)), "send_bytes_per_second": 25e9}
    return _machine("bfloat16", rate, 8, (2.0e12, 300e9, (2, 4, 8)), {**wide, "links": 8})


def _machine(
    dtype: str,
    rate: float,
    per_node: int,
    links: tuple[float, float, tuple[int, ...]],
    wide: dict[str, Any] | None = None,
) -> Machine:
    memory, bus, counts = links
    tables: dict[str, Any] = {
        "machine": {"name": "published", "ranks_per_node": per_node, "cores_per_node": 48, "memory_bytes": 80e9},
        "compute": {
            "passes": [[1e6, memory]], "exps_per_second": 1e15, "optimizer_bytes_per_second": memory,
            "step_seconds": 0.0, "operation_seconds": 0.0,
        },
        "products": {dtype: [[1024, 1024, 1024, rate]]},
        "in_node": {"latency_seconds": 1e-5, "sums": ring(bus, counts), "send_bytes_per_second": bus},
    }  # fmt: skip
    return machine_from(tables | ({"between_nodes": wide} if wide else {}))


def gpt(hidden: int, heads: int, layers: int, positions: int) -> DecoderConfig:
    sizes = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": positions, "vocab_size": VOCAB}
    return config_from_hf({"model_type": "gpt2", **sizes})


def step_seconds(machine: Machine, decoder: DecoderConfig, layout: Layout, sequences: int) -> float:
    dtype = "float16" if machine.products.float16 else "bfloat16"
    anatomy = Anatomy(Facts(decoder, dtype, decoder.max_positions), machine)
    return StepSimulator(anatomy, Step(sequences), layout).run().seconds


def flops(decoder: DecoderConfig, sequences: int, passes: int) -> float:
    """24 B s l h^2 (1 + s / 6h) for each pass, of which backward is two and a recomputed forward one; and the logits.

    Narayanan et al. 2021, equation 3, is that of four passes: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    """
    s, h, layers = decoder.max_positions, decoder.hidden_size, decoder.num_layers
    return 24.0 * passes * sequences * s * layers * h * h * (1 + s / (6 * h)) + 6.0 * sequences * s * h * VOCAB
