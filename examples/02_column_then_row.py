"""02  Column-parallel, then row-parallel: a whole MLP with one all-reduce.

    y = gelu(x Wup^T) Wdown^T = sum over ranks r of  gelu(x Wup_r^T) Wdown_r^T

The first product is cut along its outputs, the second along its inputs, and the two cuts are the same FFN columns: what
rank r computes is what rank r needs next. GELU works element by element, so it doesn't mind the cut. The other order,
row-parallel first, would need a sum before GELU, because gelu(a + b) is not gelu(a) + gelu(b).
"""

import numpy as np
from course import Watched, exercise, on_ranks, prove, say, say_each

from mpitp.backend.device import CpuDevice
from mpitp.comm import Group, SerialGroup
from mpitp.layers.build import Builder
from mpitp.layers.init import init_params
from mpitp.layers.layout import Layout
from mpitp.layers.mlp import GeluMLP
from mpitp.ops.gelu import gelu_forward

RANKS = 3
TOKENS, HIDDEN, FFN = 5, 4, 8


def make_mlp(group: Group) -> GeluMLP:
    """The library's MLP over the ranks of `group`; its weights depend on the seed alone, not on the ranks."""
    build = Builder(Layout(group), CpuDevice(), np.float64, init_std=0.5)
    share = build.layout.share(FFN)
    mlp = GeluMLP(build.column(("up",), HIDDEN, share, bias=False), build.row("down", share, HIDDEN, bias=False))
    init_params(mlp.params().items(), seed=1)
    return mlp


def main(group: Group) -> None:
    watched = Watched(group)
    x = np.random.default_rng(2).standard_normal((TOKENS, HIDDEN))  # the same on every rank
    mlp, whole = make_mlp(watched), make_mlp(SerialGroup())

    say(group, f"y = gelu(x Wup^T) Wdown^T, {FFN} FFN columns dealt to {group.size} ranks")
    columns = mlp.up.weight.spec.parts[0].held
    shapes = f"Wup {mlp.up.weight.data.shape}  Wdown {mlp.down.weight.data.shape}"
    say_each(group, f"FFN columns {columns.start}:{columns.stop}  {shapes}")

    watched.calls.clear()
    y, ctx = mlp.forward(x)
    calls = list(watched.calls)
    say(group, "\ninner activation [t, f/tp] on each rank, never gathered: first row")
    say_each(group, f"{np.round(gelu_forward(ctx.inner)[0], 2)}")
    say(group, f"\ncollectives of the forward pass: {[str(call) for call in calls] or 'none'}")
    expected = whole.forward(x)[0]
    prove(group, f"y on {group.size} ranks is y on one", (y, expected))

    say(group, "\nThe wrong order: gelu applied to partial sums, which are then added")
    k = mlp.up.weight.spec.parts[0].held  # any cut of the inner dim will do; here of the FFN columns
    inner, wdown = gelu_forward(x @ whole.up.weight.data.T), whole.down.weight.data
    partial = inner[:, k] @ wdown[:, k.start : k.stop].T
    right, wrong = gelu_forward(group.all_reduce(partial)), group.all_reduce(gelu_forward(partial))
    say(group, f"  gelu of the sum   {np.round(right[0], 3)}\n  sum of the gelus  {np.round(wrong[0], 3)}")

    exercise(
        group,
        "Set FFN = 2 at the top: on 3 ranks one has no column at all. Does it take part in the all-reduce, and what "
        "does it hand in? And how many collectives would row-parallel first, then column-parallel, need for a whole y?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
