"""Whole numbers that a plan's command line names: how many ranks, steps and microbatches there can be."""

from __future__ import annotations

from mpitp.errors import UsageError

MOST_RANKS = 1 << 20  # a plan goes through them one by one
MOST = 10**9  # of what is only counted


def check_counts(most: int, **named: int | None) -> None:
    """Raise UsageError for an option that isn't from 1 to `most`; save_every=100 is --save-every, None wasn't given."""
    for name, value in named.items():
        if value is not None and not 1 <= value <= most:
            option = f"--{name.replace('_', '-')}"
            if value < 1:
                raise UsageError(f"{option} must be at least 1, got {shown(value)}")
            raise UsageError(f"{option} {shown(value)}: expected at most {most:,}")


def count_in(text: str, most: int = MOST) -> int:
    """The number that digits say; 0 where it isn't one from 1 to `most`."""
    digits = text if text.isascii() and text.isdigit() else ""
    number = int(digits or "0") if len(digits) <= len(str(most)) else 0
    return number if number <= most else 0


def shown(value: int) -> str:
    """The number, or of thousands of digits that they are so many."""
    return str(value) if abs(value) < 10**30 else f"{'-' if value < 0 else ''}(a number of {value.bit_length()} bits)"
