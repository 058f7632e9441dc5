"""19  Convolution over ranks, as it began in 2012: by channels, or by rows of the image with a halo.

    z[i, j, n] = sum over m, l, c of  x[i + m, j + l, c] W[n, c, m, l]        a product, of unfolded pixels: z = u W^T

    by output channels   rank r has W[n_r]        x on every rank, z_r is its channels      sum of dx      I to V
    by input channels    rank r has W[:, c_r]     x_r is its channels, summands of z        sum of z       V to I
    by rows of images    every rank has all of W  x_r is its rows, and a halo of k - 1      rows to and    V to V
                                                  rows of its neighbours                    fro

The first two, one behind the other, are column-parallel and row-parallel once more (02): two layers, one sum.
Krizhevsky et al. (2012) had two GPUs of 3 GB, each with half of the channels. What rows send doesn't grow with the
image's height, and W's gradient is then a summand on every rank, as in data parallelism (13).
"""

import numpy as np
from course import Watched, exercise, nbytes, on_ranks, prove, say, say_each

from mpitp.comm import Group, SerialGroup
from mpitp.layers import Builder, init_params, make_site
from mpitp.ops.convolution import Geometry
from mpitp.optim.grad_sync import sync_gradients

RANKS = 3
IMAGES, HEIGHT, WIDTH = 2, 12, 8
CHANNELS, MIDDLE = 4, 10
GEOMETRY = Geometry(HEIGHT, WIDTH, kernel=3, padding=1)


def by_channels(group: Group):
    """Two convolutions: output channels cut, then input channels."""
    build = Builder(make_site(group, dtype="float64"), init_std=0.3)
    share = build.site.share(MIDDLE)
    first = build.convolution_by_outputs(GEOMETRY, CHANNELS, share)
    second = build.convolution_by_inputs(GEOMETRY, share, CHANNELS)
    return ready(build, first, second)


def by_rows(group: Group):
    """The same two with every rank's own rows."""
    build = Builder(make_site(group, dtype="float64"), init_std=0.3)
    first = build.convolution_by_rows(GEOMETRY, CHANNELS, MIDDLE)
    return ready(build, first, build.convolution_by_rows(GEOMETRY, MIDDLE, CHANNELS))


def ready(build: Builder, *layers):
    for i, layer in enumerate(layers):
        init_params(((f"conv{i}.{name}", param) for name, param in layer.params().items()), seed=19)
    return build.site, layers


def passes(made, x, dz):
    """z, dx, and the gradient of the second W's piece, with the piece's place."""
    site, (first, second) = made
    y, first_ctx = first.forward(x)
    relu = np.maximum(y, 0)
    z, second_ctx = second.forward(relu)
    dy = second.backward(dz, second_ctx) * (y > 0)
    dx = first.backward(dy, first_ctx)
    sync_gradients([*first.params().values(), *second.params().values()], site.mesh)
    return z, dx, second.weight.grad, second.weight.placement.parts[0].index


def main(group: Group) -> None:
    x, dz = np.random.default_rng(19).standard_normal((2, IMAGES, HEIGHT, WIDTH, CHANNELS))
    whole_z, whole_dx, whole_dw, _ = passes(by_channels(SerialGroup()), x, dz)
    say(group, f"{IMAGES} images of {HEIGHT} x {WIDTH}, {CHANNELS} to {MIDDLE} to {CHANNELS} channels\n")

    watched = Watched(group)
    z, dx, dw, piece = passes(by_channels(watched), x, dz)
    summed = sum(map(nbytes, watched.calls))
    say(group, "by channels, forward and backward:\n  " + "\n  ".join(map(str, watched.calls)))
    prove(group, "by channels", (z, whole_z), (dx, whole_dx), (dw, whole_dw[piece]))

    watched = Watched(group)
    made = by_rows(watched)
    own = made[0].share(HEIGHT).span
    z, dx, dw, _ = passes(made, x[:, own.start : own.stop], dz[:, own.start : own.stop])
    messages = [call for call in watched.calls if call.op == "send"]
    say(group, "\nby rows:")
    say_each(group, f"rows {own.start}:{own.stop}, sends {[call.shape[1] for call in messages]} rows of a halo")
    rows = slice(own.start, own.stop)
    prove(group, "by rows", (z, whole_z[:, rows]), (dx, whole_dx[:, rows]), (dw, whole_dw))

    say(group, f"\nCut by channels, a rank hands {summed} bytes to sums; by rows, to messages:")
    say_each(group, f"{sum(map(nbytes, messages))} bytes, whatever the height")
    exercise(
        group,
        "Which way sends less for images twice as high, and which for twice as many channels? Set HEIGHT = 3: every "
        "rank's windows see rows of whom? And why may the ReLU stand between the two that are cut by channels?",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
