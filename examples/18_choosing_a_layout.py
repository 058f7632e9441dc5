"""18  Choosing a layout: which axes for which model on which machine, worked out before a rank runs.

    seconds = products / what of them a rank has  +  sums over tp  +  bubble of pp  +  sums over replicas  +  optimizer
    memory  = weights, gradients, moments (cut by tp and pp, dealt by ZeRO)  +  activations

All of it are closed forms of the model's own layers: what they multiply, what they say that they send, what they keep.
A machine is a file of rates: products, sums in a node and between nodes (`mpitp bench machine` measures yours). One
machine has 16 cores a node behind slow Ethernet, the other 8 GPUs a node behind a fat tree.
"""

from pathlib import Path

import course
import numpy as np
from course import exercise, on_ranks, prove, say

from mpitp.comm import Group, make_mesh
from mpitp.layers import make_site
from mpitp.models import config_from_hf, new_model
from mpitp.plan.anatomy import Anatomy, Facts
from mpitp.plan.cost import Step, StepCost, cost_of
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import read_machine

RANKS = 2
PLANNED = 32  # ranks of the job that is planned
SEQUENCES, LENGTH = 64, 512
MODEL = {"model_type": "gpt2", "n_embd": 2048, "n_head": 16, "n_layer": 24, "n_positions": LENGTH, "vocab_size": 50257}
SMALL = MODEL | {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 32, "vocab_size": 301}
MACHINES = Path(course.__file__).resolve().parent / "machines"


def anatomy_of(model: dict, machine: str) -> Anatomy:
    facts = Facts(config_from_hf(model), "float32", model["n_positions"])
    return Anatomy(facts, read_machine(MACHINES / f"{machine}.toml"))


def layouts(ranks: int) -> list[Layout]:
    """Every way to make `ranks` of tp, pp and dp, with ZeRO where there are replicas."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = []
    for tp in sizes:
        for pp in (n for n in sizes if ranks % (tp * n) == 0 and n <= MODEL["n_layer"]):
            dp = ranks // (tp * pp)
            found += [Layout(tp=tp, pp=pp, dp=dp, zero=zero) for zero in ((0, 1) if dp > 1 else (0,))]
    return found


def line(cost: StepCost) -> str:
    share = cost.parts["products"] / cost.seconds
    return f"  {cost.layout!s:<34}{cost.seconds:7.2f} s{cost.memory.total / 1e9:6.2f} GB{share:6.0%}  {cost.limit}"


def plan(group: Group, machine: str) -> StepCost:
    """The fastest layout that fits, and the table that it was chosen from."""
    anatomy = anatomy_of(MODEL, machine)
    costs = sorted(
        (cost_of(anatomy, Step(SEQUENCES), each) for each in layouts(PLANNED)), key=lambda cost: cost.seconds
    )
    room = anatomy.machine.machine.memory_bytes
    fits = [cost for cost in costs if cost.memory.total <= room]
    say(
        group,
        f"{anatomy.machine.machine.name}: {len(fits)} of {len(costs)} layouts fit into {room / 1e9:.0f} GB a rank",
    )
    say(group, f"  {'':<34}{'a step':>9}{'a rank':>9}{'products':>9}, then most:")
    others = [cost for cost in costs if cost.layout in (Layout(tp=PLANNED), Layout(dp=PLANNED))]
    picked = {str(cost.layout): cost for cost in [*fits[:4], *others]}
    say(group, "\n".join(line(cost) for cost in picked.values()) + "\n")
    return fits[0]


def main(group: Group) -> None:
    say(group, f"{PLANNED} ranks, {SEQUENCES} sequences of {LENGTH} a step\n")
    best = [plan(group, machine) for machine in ("ethernet_cpu", "fat_tree_gpu")]
    say(group, f"One model, two machines:\n  {best[0].layout}\n  {best[1].layout}\n")

    # That the bytes are those of real ranks: a small model, laid on the ranks at hand.
    mesh = make_mesh(group, {"tp": group.size})
    model = new_model(config_from_hf(SMALL), make_site(mesh), seed=1)
    held = sum(param.data.nbytes for _, param in model.named_params())
    most = group.all_reduce(np.array([float(held)]), op="max")[0]
    planned = cost_of(anatomy_of(SMALL, "ethernet_cpu"), Step(4), Layout(tp=group.size)).memory.weights
    say(
        group, f"weights of a small model on the fullest of {group.size} ranks: {most:.0f} bytes, planned {planned:.0f}"
    )
    prove(group, "planned bytes are those of real ranks", (most, planned), limit=0.0)
    exercise(
        group,
        "Why is tp = 32 slow on both, and why can't ranks behind Ethernet have dp = 32 at all? Which layout wins with "
        "half of the layers (n_layer)? Give the Ethernet ten times the bandwidth, in a copy of its file: what changes?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
