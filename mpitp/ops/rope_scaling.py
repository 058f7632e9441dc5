r"""RoPE stretched to longer texts: how each kind of scaling changes the angles a position, and cos and sin themselves.

    linear      angles / factor: positions are squeezed (Chen et al. 2023)
    dynamic     a larger theta for texts of more than the original n positions:
                theta (factor length / n - factor + 1)^(d / (d - 2))
    yarn        slow angles / factor, fast ones kept, a ramp between; cos and sin times a factor (Peng et al. 2023)
    llama3      the same idea with another ramp and no factor
    longrope    angles / a factor of each one's own, from one list for texts within the original length and from another
                for longer ones; cos and sin times a factor (Ding et al. 2024)

A fast angle turns often within the original context, a slow one less than once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitp.errors import ConfigError

Scaling = dict[str, Any]
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ORIGINAL_LENGTH = "original_max_position_embeddings"
BY_LENGTH = ("dynamic", "longrope")  # kinds whose angles depend on the length of the text


def kind_of(scaling: Scaling | None) -> str:
    """The scaling's kind; "default" for None."""
    return str((scaling or {}).get("rope_type", (scaling or {}).get("type", "default")))


def scaled_frequencies(width: int, theta: float, scaling: Scaling | None = None, length: int = 0) -> np.ndarray:
    """Angle a position of each pair of columns, float64 [width/2], for a text of `length` positions.

    Raises ConfigError for another kind than `KINDS` and for a number that is missing or can't be.
    """
    kind, exponents = kind_of(scaling), np.arange(0, width, 2, dtype=np.float64) / width
    if kind not in KINDS:
        raise ConfigError(f"rope scaling type {kind!r} is not supported; expected one of {', '.join(KINDS)}")
    if scaling is None or kind == "default":
        return 1.0 / theta**exponents
    if kind == "dynamic":
        return 1.0 / _stretched(theta, width, scaling, length) ** exponents
    if kind == "longrope":
        which = "long_factor" if length > _number(scaling, ORIGINAL_LENGTH) else "short_factor"
        return 1.0 / (_numbers(scaling, which, width // 2) * theta**exponents)
    plain = 1.0 / theta**exponents
    kept = {"linear": _none_kept, "yarn": _yarn_kept, "llama3": _llama3_kept}[kind](plain, theta, scaling)
    return (1.0 - kept) * plain / _number(scaling, "factor") + kept * plain


def amplitude(scaling: Scaling | None) -> float:
    """What cos and sin are multiplied by."""
    return float((scaling or {}).get("attention_factor", 1.0))


def default_amplitude(scaling: Scaling, max_positions: int) -> float:
    """The amplitude of a scaling that doesn't give one, as transformers has it."""
    kind = kind_of(scaling)
    if kind == "longrope":
        original = _number(scaling, ORIGINAL_LENGTH)
        factor = float(scaling.get("factor") or max_positions / original)
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    if kind != "yarn":
        return 1.0
    factor, own, all_dims = _number(scaling, "factor"), scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and all_dims:
        return _yarn_amplitude(factor, own) / _yarn_amplitude(factor, all_dims)
    return _yarn_amplitude(factor, 1.0)


def _yarn_amplitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _stretched(theta: float, width: int, scaling: Scaling, length: int) -> float:
    """theta of a text that may be longer than the original."""
    factor, original = _number(scaling, "factor"), _number(scaling, ORIGINAL_LENGTH)
    if width <= 2:
        raise ConfigError(f"rope scaling 'dynamic' needs heads that are more than 2 wide, got {width}")
    return float(theta * (factor * max(length, original) / original - (factor - 1)) ** (width / (width - 2)))


def _none_kept(plain: np.ndarray, theta: float, scaling: Scaling) -> np.ndarray:
    return np.zeros_like(plain)


def _llama3_kept(plain: np.ndarray, theta: float, scaling: Scaling) -> np.ndarray:
    """How much of each angle stays, as transformers' `_compute_llama3_parameters`."""
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = _number(scaling, ORIGINAL_LENGTH) * plain / (2 * math.pi)  # in the original context
    if not high > low:
        raise ConfigError(f"rope scaling: high_freq_factor={high} must be greater than low_freq_factor={low}")
    return np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: few turns, scaled; 1: many, kept


def _yarn_kept(plain: np.ndarray, theta: float, scaling: Scaling) -> np.ndarray:
    """The same, as transformers' `_compute_yarn_parameters`: a ramp over the numbers of the pairs of columns."""
    original, width = _number(scaling, ORIGINAL_LENGTH), 2 * len(plain)

    def pair_of(turns: float) -> float:
        """The number of the pair that turns so often in the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(float(scaling.get("beta_fast") or 32)), pair_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (np.arange(width // 2) - first) / (last - first if last != first else 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def _number(scaling: Scaling, key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"rope scaling {kind_of(scaling)!r}: {key} must be a positive number, got {value!r}")
    return float(value)


def _numbers(scaling: Scaling, key: str, count: int) -> np.ndarray:
    values = scaling.get(key)
    if not isinstance(values, list) or len(values) != count or not all(_is_positive(value) for value in values):
        raise ConfigError(f"rope scaling 'longrope': {key} must be {count} positive numbers, got {values!r:.60}")
    return np.array(values, np.float64)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
