"""RoPE's keys in a config.json: theta, scaling, and how much of a head is turned.

Both `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (older files) are read; a file that has
both must say the same in both. Some types call theta or the turned part otherwise (`rotary_emb_base`, `rotary_pct`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import MOST_NUMBER, HfConfigReader
from mpitp.models.facts import with_traits
from mpitp.models.windows import FULL, SLIDING
from mpitp.ops.rope_scaling import ORIGINAL_LENGTH as _ORIGINAL
from mpitp.ops.rope_scaling import default_amplitude

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": (_ORIGINAL, "attention_factor", "factor"),
}


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """How a model type calls RoPE's keys, and what they are where the file is silent.

    partial_key: "" where the type turns whole heads. kinds: the names of a scaling in files of this type (None: those
    that the reference knows). original: the length before scaling, where the type's class has it beside the scaling.
    """

    theta: float = 10000.0
    theta_key: str = "rope_theta"
    partial: float = 1.0
    partial_key: str = ""
    kinds: Mapping[str, str] | None = None
    original: int | None = None


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """What was read: theta, the scaling (None: none), the turned part of a head, and how long a text may be."""

    theta: float
    scaling: dict[str, Any] | None
    partial: float
    max_positions: int


def with_rope(facts: Mapping[str, Any], read: HfConfigReader, keys: RopeKeys | None = None) -> dict[str, Any]:
    """The facts of a DecoderConfig with those of RoPE."""
    rope = read_rope(read, facts["max_positions"], keys)
    width = int(facts["head_dim"] * rope.partial)
    if rope.partial > 1 or width < 2:
        raise ConfigError(
            f"config.json: the part of a head that RoPE turns must be at most 1 and at least 2 columns, got "
            f"{rope.partial} of {facts['head_dim']} columns"
        )
    turned = with_traits(facts, rotary_width=0 if rope.partial == 1 else width)
    return turned | {"max_positions": rope.max_positions, "rope_theta": rope.theta, "rope_scaling": rope.scaling}


def with_layered_rope(
    facts: Mapping[str, Any], read: HfConfigReader, theta: float, local_theta: float
) -> dict[str, Any]:
    """The same where blocks with a window turn in their own way (Gemma 3): `rope_parameters` has an object for each
    kind of block, or `rope_local_base_freq` stands beside `rope_theta`.
    """
    kinds = read.mapping("rope_parameters") or {}
    if others := [key for key in kinds if key not in (FULL, SLIDING)]:
        raise ConfigError(f"config.json: rope_parameters must have {FULL} and {SLIDING}, got {others!r:.60}")
    keys = (RopeKeys(theta), RopeKeys(local_theta, theta_key="rope_local_base_freq"))
    asides = (("rope_theta", "rope_scaling"), ("rope_local_base_freq",))
    found = []
    for kind, own, aside in zip((FULL, SLIDING), keys, asides, strict=True):
        given = {key: value for key in aside if (value := read.take(key)) is not None}
        params = kinds.get(kind)
        if isinstance(params, dict) and "truncate" in params:  # which the reference looks for outside, in vain
            read.passed_over.append(f"rope_parameters.{kind}.truncate")
            params = {key: value for key, value in params.items() if key != "truncate"}
        inner = HfConfigReader({"model_type": read.model_type, **given, "rope_parameters": params})
        found.append(read_rope(inner, facts["max_positions"], own))
        read.passed_over += inner.passed_over
    rope, local = found
    turned = with_traits(facts, local_theta=local.theta, local_scaling=local.scaling)
    return turned | {"max_positions": rope.max_positions, "rope_theta": rope.theta, "rope_scaling": rope.scaling}


def read_rope(read: HfConfigReader, max_positions: int, keys: RopeKeys | None = None) -> RopeFacts:
    """The facts, from either spelling. Raises ConfigError for what is missing, contradictory or not supported."""
    keys = keys or RopeKeys()
    objects = {key: read.mapping(key) for key in ("rope_parameters", "rope_scaling")}
    theta = _agreed(read, objects, keys.theta_key, "rope_theta", keys.theta)
    partial = 1.0
    if keys.partial_key:
        partial = _agreed(read, objects, keys.partial_key, "partial_rotary_factor", keys.partial)
    original = read.integer(_ORIGINAL, keys.original or 0)
    scalings = {
        key: _with_length(_checked_scaling(read, key, values, keys), key, original, max_positions)
        for key, values in objects.items()
        if values is not None
    }
    (first, scaling), *others = scalings.items() or [("", None)]
    for key, other in others:
        if other != scaling:
            raise ConfigError(f"config.json: {first}={scaling} contradicts {key}={other}; one of them must go")
    return RopeFacts(theta, scaling, partial, _most(scaling, max_positions))


def _agreed(
    read: HfConfigReader, objects: Mapping[str, dict[str, Any] | None], key: str, inner: str, default: float
) -> float:
    """The value of a key of the file that may stand inside its objects too."""
    read.number(key, default)
    found = {key: read.raw.get(key)}
    found |= {f"{name}.{inner}": values.get(inner) for name, values in objects.items() if values}
    given = {name: value for name, value in found.items() if value is not None}
    for name, value in given.items():
        check_positive(name, value)
    (first, value), *others = given.items() or [(key, default)]
    for name, other in others:
        if other != value:
            raise ConfigError(f"config.json: {first}={value} contradicts {name}={other}; one of them must go")
    return float(value)


def _checked_scaling(read: HfConfigReader, key: str, scaling: dict[str, Any], keys: RopeKeys) -> dict[str, Any] | None:
    """The scaling's kind with the values that the reference reads for it; others are passed over, as it does."""
    kind = _kind(scaling, keys)
    if not keys.partial_key:
        read.refuse_unless(f"{key}.partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0), 1.0)
    known = (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()))
    values = {name: scaling[name] for name in known if scaling.get(name) is not None}
    rest = {"type", "rope_type", "rope_theta", *known, *(["partial_rotary_factor"] if keys.partial_key else [])}
    others = [name for name in scaling if name not in rest]
    missing = [name for name in _REQUIRED[kind] if name not in values]
    if missing or any(isinstance(scaling[name], dict | list) for name in others):
        raise ConfigError(
            f"config.json: RoPE scaling {kind!r} needs the keys {_REQUIRED[kind]}, got {(*values, *others)}"
        )
    read.passed_over += [f"{key}.{name}" for name in others]
    for name, value in values.items():
        _check_value(name, value)
    return None if kind == "default" else {"rope_type": kind} | values


def _kind(scaling: dict[str, Any], keys: RopeKeys) -> str:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    supported = tuple(_REQUIRED) if keys.kinds is None else tuple(dict.fromkeys(keys.kinds.values()))
    name = keys.kinds.get(kind, kind) if keys.kinds is not None and isinstance(kind, str) else kind
    if scaling.get("type", kind) != kind or not isinstance(name, str) or name not in supported:
        raise ConfigError(
            f"config.json: RoPE scaling type {kind!r} is not supported; supported: {', '.join(supported)}"
        )
    return name


def _check_value(name: str, value: Any) -> None:
    if name == "truncate":
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: RoPE scaling truncate must be true or false, got {value!r:.60}")
    elif name in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise ConfigError(f"config.json: RoPE scaling {name} must be a list of numbers, got {value!r:.60}")
        for each in value:
            check_positive(f"RoPE scaling {name}", each)
    else:
        check_positive(f"RoPE scaling {name}", value)


def _with_length(scaling: dict[str, Any] | None, key: str, original: int, max_positions: int) -> dict[str, Any] | None:
    """The scaling with the length before it, which may stand beside it, and with the amplitude of cos and sin."""
    if scaling is None or scaling["rope_type"] == "linear":
        return scaling
    if scaling["rope_type"] == "dynamic":
        return scaling | {_ORIGINAL: max_positions}
    inside = scaling.get(_ORIGINAL)
    if original and inside and inside != original:
        raise ConfigError(f"config.json: {_ORIGINAL}={original} contradicts {key}.{_ORIGINAL}={inside}; one must go")
    whole = scaling | {_ORIGINAL: inside or original or max_positions}
    if scaling["rope_type"] == "llama3":
        return whole
    return {"attention_factor": default_amplitude(whole, max_positions)} | whole


def _most(scaling: dict[str, Any] | None, max_positions: int) -> int:
    """How long a text may be: a scaling that stretches the original length by a factor goes that far."""
    if scaling is None or scaling["rope_type"] not in ("dynamic", "yarn"):
        return max_positions
    return max(max_positions, int(scaling[_ORIGINAL] * scaling["factor"]))


def check_positive(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST_NUMBER:
        raise ConfigError(f"config.json: {name} must be a positive number, got {value!r:.60}")
