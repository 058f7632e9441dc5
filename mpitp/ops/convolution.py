r"""Convolution of images (LeCun et al. 1989) as a product: the pixels under every window, a row of a matrix each.

    forward     u  = unfold(x)        x [b, y, x, c], u [b y' x', c k k]: what each window sees, channel by channel
                z  = u @ W.T          W [n, c, k, k], as Hugging Face stores it; z [b y' x', n]
    backward    dx = fold(dz @ W)     fold is unfold's adjoint: a pixel adds up over the windows that have seen it
                dW = dz.T @ u

A window at (i, j) sees pixels (i s - p + m, j s - p + n) for m, n < k: stride s, padding p. Outside the image are
zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.errors import ConfigError

Index = tuple[slice, slice]


@dataclass(frozen=True, slots=True)
class Windows:
    """Where windows of `kernel` by `kernel` pixels lie in an array of pixels, a row and a column of them.

    `first`: the row and the column of the first window's first pixel; outside the array (negative, say) are zeros.
    """

    kernel: int
    stride: int
    first: tuple[int, int]
    counts: tuple[int, int]

    def meetings(self, size: tuple[int, int]) -> Iterator[tuple[int, int, Index, Index]]:
        """For each place (m, n) in a window: the windows with a pixel of an array of this size there, and it."""
        for m in range(self.kernel):
            rows, pixel_rows = self._meeting(0, m, size[0])
            for n in range(self.kernel):
                columns, pixel_columns = self._meeting(1, n, size[1])
                yield m, n, (rows, columns), (pixel_rows, pixel_columns)

    def _meeting(self, dim: int, place: int, size: int) -> tuple[slice, slice]:
        """Windows i along `dim` with 0 <= i stride + offset < size, and those pixels."""
        offset = self.first[dim] + place
        start = max(0, -(offset // self.stride))  # rounded up: the first one that isn't before the array
        stop = max(start, min(self.counts[dim], -((offset - size) // self.stride)))
        first = start * self.stride + offset
        return slice(start, stop), slice(first, first + (stop - start) * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Images of `height` by `width` pixels under windows of `kernel` by `kernel`, `stride` apart, `padding` around."""

    height: int
    width: int
    kernel: int
    stride: int = 1
    padding: int = 0

    def __post_init__(self) -> None:
        smallest = min(self.height, self.width) + 2 * self.padding
        if min(self.kernel, self.stride) < 1 or self.padding < 0 or smallest < self.kernel:
            raise ConfigError(
                f"a convolution of images of {self.height} x {self.width} with kernel={self.kernel}, "
                f"stride={self.stride}, padding={self.padding} has no window: kernel and stride must be at least 1, "
                f"padding at least 0, and the kernel at most height and width with the padding ({smallest})"
            )

    @property
    def outputs(self) -> tuple[int, int]:
        """Rows and columns of windows."""
        return self._count(self.height), self._count(self.width)

    def _count(self, size: int) -> int:
        return (size + 2 * self.padding - self.kernel) // self.stride + 1

    def seen(self, outputs: range) -> range:
        """The rows of the image that these rows of windows see."""
        if not outputs:
            return range(0)
        start = max(0, outputs.start * self.stride - self.padding)
        stop = min(self.height, (outputs.stop - 1) * self.stride - self.padding + self.kernel)
        return range(start, max(start, stop))

    def windows(self, outputs: range | None = None) -> Windows:
        """All windows in the whole image; or those of some rows in an array of the rows that they see."""
        rows = range(self.outputs[0]) if outputs is None else outputs
        top = 0 if outputs is None else self.seen(rows).start
        first = rows.start * self.stride - self.padding - top, -self.padding
        return Windows(self.kernel, self.stride, first, (len(rows), self.outputs[1]))


def unfold(x: Array, windows: Windows) -> Array:
    """x [b, y, x, c] -> what each window sees [b y' x', c k k]."""
    xp, k, (rows, columns) = array_module(x), windows.kernel, windows.counts
    images, channels = x.shape[0], x.shape[3]
    seen = xp.zeros((images, rows, columns, channels, k, k), x.dtype)
    for m, n, (i, j), (y, x_) in windows.meetings(x.shape[1:3]):
        seen[:, i, j, :, m, n] = x[:, y, x_]
    return seen.reshape(images * rows * columns, channels * k * k)


def fold(seen: Array, windows: Windows, out: Array) -> Array:
    """The adjoint of `unfold`: [b y' x', c k k] -> out [b, y, x, c], every pixel the sum over where it was seen."""
    k, (rows, columns) = windows.kernel, windows.counts
    seen = seen.reshape(out.shape[0], rows, columns, out.shape[3], k, k)
    out[...] = 0
    for m, n, (i, j), (y, x_) in windows.meetings(out.shape[1:3]):
        out[:, y, x_] += seen[:, i, j, :, m, n]
    return out
