"""03  The backward pass: where forward copies, backward sums; where forward sums, backward copies.

    CopyToTP       forward  x -> (x, x, ..., x)         backward  dx = sum over ranks of dx_r      I to R
    ReduceFromTP   forward  y = sum over ranks of y_r   backward  dy -> (dy, dy, ..., dy)          P to I

Each is the other's adjoint, which is what a backward pass is made of:  <A x, dy> = <x, A* dy>  for all x and dy.
Written out for the copy: sum over r of <x, dy_r> = <x, sum over r of dy_r>.

A linear is a product (the weights) times a pair (one of these two): the product never communicates.
"""

import numpy as np
from course import Watched, exercise, on_ranks, prove, say, say_each

from mpitp.comm import Group, SerialGroup
from mpitp.layers import Builder, ColumnParallelLinear, CopyToTP, ReduceFromTP, init_params, make_site

RANKS = 3
TOKENS, IN, OUT = 3, 4, 7


def make_linear(group: Group) -> ColumnParallelLinear:
    """A column-parallel linear, equal weights at every rank count."""
    site = make_site(group, dtype="float64")
    linear = Builder(site, init_std=1.0).column(("w",), IN, site.share(OUT), bias=False)
    init_params(linear.params().items(), seed=3)
    return linear


def main(group: Group) -> None:
    random = np.random.default_rng(3)
    x, dy_whole = random.standard_normal((TOKENS, IN)), random.standard_normal((TOKENS, OUT))
    watched = Watched(group)
    linear, whole = make_linear(watched), make_linear(SerialGroup())
    held = linear.product.placement.parts[0].held[0]
    dy = dy_whole[:, held.start : held.stop]  # a rank gets the gradient of its own columns of y

    say(group, f"A column-parallel linear, {IN} inputs, {OUT} outputs on {group.size} ranks\n")
    watched.calls.clear()
    _, ctx = linear.forward(x)
    say(group, f"forward:   {[str(call) for call in watched.calls] or 'no communication'}")
    watched.calls.clear()
    dx = linear.backward(dy, ctx)
    say(group, f"backward:  {[str(call) for call in watched.calls]}")
    say(group, "\nfirst row of each rank's own part of dx, dy_r W_r:")
    say_each(group, str(np.round((dy @ linear.product.weight.data)[0], 3)))
    say(group, f"  their sum {np.round(dx[0], 3)}")
    _, whole_ctx = whole.forward(x)
    prove(group, "dx is that of one rank", (dx, whole.backward(dy_whole, whole_ctx)))
    prove(group, "dW_r is rows of dW", (linear.product.weight.grad, whole.product.weight.grad[held]))

    say(group, "\nThe adjoint test, with a different random dy_r on every rank:")
    dy_r, y_r = np.random.default_rng(group.rank).standard_normal((2, TOKENS, IN))
    copy, reduce = CopyToTP(make_site(group).summation()), ReduceFromTP(make_site(group).summation())
    left = group.all_reduce(np.array([np.vdot(copy.forward(x), dy_r)]))[0]
    right = np.vdot(x, copy.start_backward([dy_r.copy()], like=x).wait())
    say(group, f"  copy    sum of <copy(x), dy_r>  {left:+.6f}   <x, sum of dy_r>        {right:+.6f}")
    left2 = np.vdot(reduce.forward([y_r.copy()], like=x), x)
    right2 = group.all_reduce(np.array([np.vdot(y_r, reduce.backward(x))]))[0]
    say(group, f"  reduce  <sum of y_r, dy>        {left2:+.6f}   sum of <y_r, copy(dy)>  {right2:+.6f}")
    prove(group, "both pairs are adjoint", (left, right), (left2, right2), limit=1e-11)

    exercise(
        group,
        "What if backward forgot its sum? Put the line  dx = dy @ linear.product.weight.data  below the one that calls "
        "linear.backward. Which proof fails, and on how many ranks would you never have noticed?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
