"""Matrices as text: numbers where they fit, shades of magnitude where they don't."""

from __future__ import annotations

import math

from mpitp.step.picture import Picture

SHADES = " .:-=+*#%@"  # from 0 to the largest magnitude on any rank
NUMBER_WIDTHS = (6, 5)  # with two decimals, with one
GAP = 2
LEAST_PANEL = 7  # "rank 12"


def panels(pictures: list[Picture], names: list[str], width: int, height: int, *, shades: bool) -> list[str]:
    """The ranks' arrays side by side in at most `width` columns and `height` lines, their names above them.

    Numbers are shown where all columns fit, unless `shades`; all ranks are shown to one scale, so they can be compared.
    Ranks for which there is no room are counted below.
    """
    count = max((width + GAP) // (LEAST_PANEL + GAP), 1)
    if len(pictures) > count:
        first = panels(pictures[:count], names[:count], width, height - 1, shades=shades)
        return [*first, f"... and {len(pictures) - count} more (r: one rank at a time)"]
    each = (width - GAP * (len(pictures) - 1)) // len(pictures)
    largest = max((abs(value) for picture in pictures for row in picture.values for value in row), default=0.0)
    digits = 0 if shades else fits(pictures, width)
    as_numbers = digits > 0
    exponent = scale_of(largest) if as_numbers and not pictures[0].is_integer else 0
    heads = [f"{name} {list(picture.shape)}"[:each] for name, picture in zip(names, pictures, strict=True)]
    if as_numbers:
        blocks = [_parted(picture, _numbers(picture, exponent, digits)) for picture in pictures]
    else:
        blocks = [_parted(picture, _shaded(picture, each, largest)) for picture in pictures]
    lines = [_join(heads, each)]
    longest = max(len(block) for block in blocks)
    scale = _scale_note(as_numbers, exponent, largest, pictures[0])
    room = height - 1 - bool(scale)
    shown = longest if longest <= room else max(room - 1, 1)
    for row in range(shown):
        lines.append(_join([block[row][:each] if row < len(block) else "" for block in blocks], each))
    if shown < longest:
        lines.append(f"... {longest - shown} more rows")
    return [*lines, scale] if scale else lines


def scale_of(largest: float) -> int:
    """The power of ten to divide by, 0 where numbers are readable as they are."""
    if not largest or not math.isfinite(largest):
        return 0
    exponent = math.floor(math.log10(largest))
    return 0 if -1 <= exponent <= 1 else exponent


def fits(pictures: list[Picture], width: int) -> int:
    """How many columns a number gets when all values are shown side by side; 0: they don't fit."""
    each = (width - GAP * (len(pictures) - 1)) // len(pictures)
    columns = max(len(picture.values[0]) if picture.values else 0 for picture in pictures)
    if not all(picture.is_whole for picture in pictures):
        return 0
    return next((digits for digits in NUMBER_WIDTHS if columns * digits <= each), 0)


def rows_of(picture: Picture) -> int:
    """Lines that an array takes; of three dims, such as scores by head, one more between two of the first."""
    gaps = picture.shape[0] - 1 if len(picture.shape) == 3 and picture.is_whole else 0
    return len(picture.values) + max(gaps, 0)


def _parted(picture: Picture, lines: list[str]) -> list[str]:
    """The lines of an array of three dims with an empty one between two of the first dim."""
    if rows_of(picture) == len(lines):
        return lines
    size = picture.shape[1]
    return [line for i, text in enumerate(lines) for line in ([""] if i and i % size == 0 else []) + [text]]


def _numbers(picture: Picture, exponent: int, digits: int) -> list[str]:
    if picture.is_integer:
        return ["".join(f"{value:{digits}d}" for value in row) for row in picture.values]
    factor = 10.0**-exponent
    return ["".join(f"{value * factor:z{digits}.{digits - 4}f}" for value in row) for row in picture.values]


def _shaded(picture: Picture, width: int, largest: float) -> list[str]:
    """One character a value, or a column in every few when there are more than fit."""
    columns = len(picture.values[0]) if picture.values else 0
    every = -(-columns // max(width, 1)) or 1
    return ["".join(_shade(max(map(abs, row[i : i + every])), largest) for i in range(0, columns, every))
            for row in picture.values]  # fmt: skip


def _shade(value: float, largest: float) -> str:
    if not value or not largest:
        return SHADES[0]
    return SHADES[min(1 + int(value / largest * (len(SHADES) - 1)), len(SHADES) - 1)]


def _scale_note(as_numbers: bool, exponent: int, largest: float, picture: Picture) -> str:
    if as_numbers:
        return f"times 1e{exponent}" if exponent else ""
    what = "magnitudes" if picture.is_whole else "root mean squares of tiles"
    return f"{what}: '{SHADES}' from 0 to {largest:.3g}"


def _join(texts: list[str], width: int) -> str:
    return (" " * GAP).join(f"{text:{width}}" for text in texts).rstrip()
