"""What a value must satisfy beyond its type, and how that is said."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy beyond its type, and how that is said."""

    holds: Callable[[Any], bool]
    words: str


POSITIVE = Rule(lambda x: x > 0, "above 0")
AT_LEAST_1 = Rule(lambda x: x >= 1, "of at least 1")
AT_LEAST_0 = Rule(lambda x: x >= 0, "of at least 0")
BELOW_1 = Rule(lambda x: 0 <= x < 1, "from 0 up to, but not including, 1")
PART = Rule(lambda x: 0 < x < 1, "above 0 and below 1")
BETAS = Rule(lambda pair: all(0 <= x < 1 for x in pair), "each from 0 up to, but not including, 1")
SEED = Rule(lambda x: 0 <= x < 2**63, "from 0 to 2^63 - 1")
ZERO = Rule(lambda x: x in (0, 1, 2, 3), "out of 0, 1, 2, 3")
COUNTS = Rule(lambda counts: all(count >= 0 for count in counts), "of at least 0 each")
SHARES = Rule(
    lambda shares: isinstance(shares, str) or all(min(own) >= 0 and any(own) for own in shares.values()),
    "of at least 0, and one above 0",
)
NOT_EMPTY = Rule(lambda text: bool(text.strip()), "that is not empty")

_UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def duration_seconds(text: str) -> float | None:
    """Seconds of "1h50m", "90s", "2d"; None for "". Raises ValueError for anything else."""
    if not text:
        return None
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
        raise ValueError(text)
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([dhms])", text))


def _is_duration(text: str) -> bool:
    try:
        return duration_seconds(text) != 0
    except ValueError:
        return False


DURATION = Rule(_is_duration, 'such as "1h50m" or "90s"')
SIGNALS = Rule(
    lambda names: all(f"SIG{name}" in signal.Signals.__members__ and name not in ("KILL", "STOP") for name in names),
    "of signals that can be caught, as USR1",
)
RECOMPUTE = Rule(
    lambda text: re.fullmatch(r"none|attention|full|every:[1-9]\d{0,5}", text) is not None,
    'out of "none", "attention", "full", or such as "every:2" (every second block)',
)
GROUP = Rule(
    lambda text: not text or re.fullmatch(r"[^:]+:[A-Za-z_]\w*", text) is not None,
    'such as "my.module:Class" or "path/to/file.py:Class"',
)


def one_of(*choices: str) -> Rule:
    """The value is one of the given words."""
    return Rule(lambda x: x in choices, "out of " + ", ".join(f'"{choice}"' for choice in choices))
