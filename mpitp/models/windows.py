"""Which blocks see a window only: `layer_types`, `sliding_window` and their kin in a config.json, as transformers reads
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpitp.errors import ConfigError
from mpitp.models.config import HfConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"


def read_window(read: HfConfigReader, default: int | None) -> int | None:
    """`sliding_window`; None: none. A file that is silent has the default, null means none."""
    if "sliding_window" not in read.raw:
        return default
    if read.raw["sliding_window"] is None:
        return None
    window = read.integer("sliding_window")
    if window < 1:
        raise ConfigError(f"config.json: sliding_window must be at least 1, or null for none, got {window}")
    return window


def read_layer_types(read: HfConfigReader, num_layers: int, default: Sequence[str]) -> Sequence[str]:
    """The kind of each block; `default` where the file names none."""
    kinds = read.take("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise ConfigError(f"config.json: layer_types={kinds!r:.60} is not supported; supported: {FULL} and {SLIDING}")
    if len(kinds) < num_layers:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
    return kinds


def windows_of(kinds: Sequence[str], window: int | None, num_layers: int, max_positions: int) -> tuple[int, ...]:
    """How many of the newest positions each block sees; (): all see all. A window as long as the positions is none."""
    if window is None and SLIDING in kinds[:num_layers]:
        raise ConfigError(f"config.json: layer_types has {SLIDING}, but there is no sliding_window")
    width = 0 if window is None or window >= max_positions else window
    windows = tuple(width if kind == SLIDING else 0 for kind in kinds[:num_layers])
    return windows if any(windows) else ()
