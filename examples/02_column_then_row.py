"""02  Column-parallel, then row-parallel: a whole MLP with one all-reduce.

    y = gelu(x Wup^T) Wdown^T = sum over ranks r of  gelu(x Wup_r^T) Wdown_r^T

The first product is cut along its outputs, the second along its inputs, and the two cuts are the same FFN columns: what
rank r computes is what rank r needs next. GELU works element by element, so it doesn't mind the cut. The other order,
row-parallel first, would need a sum before GELU, because gelu(a + b) is not gelu(a) + gelu(b).

Each layer says what it makes of what it is given, with a letter: I, equal on all ranks; R, equal and used by each for
its own part of the work; V, each its own piece; P, summands. From the letters alone a forgotten sum is found.
"""

import numpy as np
from course import Watched, exercise, on_ranks, prove, say, say_each

from mpitp.comm import Group, SerialGroup
from mpitp.layers import MLP, Builder, init_params, make_site, typed_layers
from mpitp.ops.gelu import gelu_forward

RANKS = 3
TOKENS, HIDDEN, FFN = 5, 4, 8


def make_mlp(group: Group) -> MLP:
    """The library's MLP over the ranks of `group`; its weights depend on the seed alone, not on the ranks."""
    site = make_site(group, dtype="float64")
    mlp = Builder(site, init_std=0.5).mlp(HIDDEN, site.share(FFN), gated=False, bias=False)
    init_params(mlp.params().items(), seed=1)
    return mlp


def main(group: Group) -> None:
    watched = Watched(group)
    x = np.random.default_rng(2).standard_normal((TOKENS, HIDDEN))  # the same on every rank
    mlp, whole = make_mlp(watched), make_mlp(SerialGroup())

    say(group, f"y = gelu(x Wup^T) Wdown^T, {FFN} FFN columns dealt to {group.size} ranks")
    columns = mlp.up.product.placement.parts[0].held[0]
    shapes = f"Wup {mlp.up.product.shape}  Wdown {mlp.down.product.shape}"
    say_each(group, f"FFN columns {columns.start}:{columns.stop}  {shapes}")
    for name, layer in typed_layers({"mlp": mlp}, make_site(group).batch_type).items():
        say(group, f"  {name:<16}{layer.incoming} -> {layer.outgoing}")

    watched.calls.clear()
    y, ctx = mlp.forward(x)
    calls = list(watched.calls)
    say(group, "\ninner activation [t, f/tp] on each rank, never gathered: first row")
    say_each(group, f"{np.round(ctx.down.x[0], 2)}")
    say(group, f"\ncollectives of the forward pass: {[str(call) for call in calls] or 'none'}")
    expected = whole.forward(x)[0]
    prove(group, f"y on {group.size} ranks is y on one", (y, expected))

    say(group, "\nThe wrong order: gelu applied to partial sums, which are then added")
    k = columns  # any cut of the inner dim will do; here of the FFN columns
    wup, wdown = whole.up.product.weight.data, whole.down.product.weight.data
    partial = gelu_forward(x @ wup.T)[:, k] @ wdown[:, k.start : k.stop].T
    right, wrong = gelu_forward(group.all_reduce(partial)), group.all_reduce(gelu_forward(partial))
    say(group, f"  gelu of the sum   {np.round(right[0], 3)}\n  sum of the gelus  {np.round(wrong[0], 3)}")

    exercise(
        group,
        "Set FFN = 2 at the top: on 3 ranks one has no column at all. Does it take part in the all-reduce, and what "
        "does it hand in? And how many collectives would row-parallel first, then column-parallel, need for a whole y?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
