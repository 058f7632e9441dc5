"""The facts of a decoder-only model that layers and programs need, and strict reading of Hugging Face's config.json.

Each model type reads its own keys (`models/gpt2.py`, `models/llama.py`). A key is either used, or changes nothing in
the maths, or is an error: silence about a key that does change the maths would be wrong numbers. Which is which says
`models/known_keys.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.known_keys import (
    ALIASES,
    FILE_KEYS,
    HARMLESS_KEYS,
    QUIET_VALUES,
    named,
    required_values,
    windows_differ,
)
from mpitp.models.traits import Traits
from mpitp.ops.groupwise import Grouping
from mpitp.ops.rope_scaling import BY_LENGTH, ORIGINAL_LENGTH, kind_of

SIZES = ("vocab_size", "hidden_size", "num_layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "max_positions")
MOST = {"num_layers": 10_000}  # beyond it a size is a slip or an attack, whatever the machine
MOST_OF_ANY = 2**31 - 1
MOST_ELEMENTS = 2**50  # of one matrix
MOST_INIT_STD = 100
MOST_NUMBER = 1e300
MOST_HINTS = 100  # keys, and characters of one, that are compared with the known ones


def file_key(model_type: str, fact: str) -> str:
    """The key of config.json (and of the run file's [model]) that a fact such as "kv_heads" comes from."""
    return FILE_KEYS.get(model_type, {}).get(fact, fact)


@dataclass(frozen=True, slots=True)
class Dropouts:
    """Dropout rates of the embedding's output, the attention probabilities and the residual branches."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; sizes in the glossary's terms. `hf` is the config.json it was read from."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    max_positions: int
    norm_eps: float
    tied: bool
    init_std: float
    dropouts: Dropouts = Dropouts()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 0.0  # 0: no RoPE
    rope_scaling: dict[str, Any] | None = None
    traits: Traits = Traits()
    grouping: Grouping | None = None  # of weights in 8 or 4 bits (models/groupwise.py); None: floats
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    # which file names which ends of text, where more than config.json was read (models/ends.py)
    ends: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False, repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)  # for a program to say once
    # keys of config.json that nobody reads, and the known key that each resembles ("": none)
    unread: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_sizes()
        if not self.norm_eps >= 0:
            raise ConfigError(f"config.json: {self.key('norm_eps')} must be at least 0, got {self.norm_eps}")
        if self.norm_eps > 1:
            raise ConfigError(f"config.json: {self.key('norm_eps')} must be at most 1, got {self.norm_eps}")
        if not 0 <= self.init_std <= MOST_INIT_STD:
            raise ConfigError(
                f"config.json: {self.key('init_std')} must lie in [0, {MOST_INIT_STD}], got {self.init_std}"
            )
        self._check_products()
        self._check_groups()
        self._check_ids()
        self._check_heads()

    def _check_sizes(self) -> None:
        for name in SIZES:
            value, most = getattr(self, name), MOST.get(name, MOST_OF_ANY)
            if value < 1:
                raise ConfigError(f"config.json: {self.key(name)} must be at least 1, got {value}")
            if value > most:
                raise ConfigError(f"config.json: {self.key(name)} must be at most {most}, got {value!r:.40}")

    def _check_heads(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"config.json: {self.key('heads')}={self.heads} must be a multiple of "
                f"{self.key('kv_heads')}={self.kv_heads}: each KV head serves as many heads as any other"
            )
        if self.traits.rotary_width % 2:
            raise ConfigError(
                f"config.json: RoPE turns pairs, so its part of {self.key('head_dim')}={self.head_dim} must be even, "
                f"got {self.traits.rotary_width} columns"
            )
        if self.rope_theta and self.head_dim % 2 and not self.traits.rotary_width:
            without = "" if self.hf.get("head_dim") else f" ({self.key('hidden_size')} / {self.key('heads')})"
            raise ConfigError(
                f"config.json: RoPE turns pairs, so {self.key('head_dim')} must be even, got {self.head_dim}{without}"
            )

    def _check_groups(self) -> None:
        """Groups of weights lie along a matrix's inputs, and no cut between ranks may part one."""
        size = self.grouping.size if self.grouping else 1
        for fact in ("hidden_size", "head_dim", "ffn_hidden"):
            if getattr(self, fact) % size:
                raise ConfigError(
                    f"config.json: weights in groups of {size} need sizes that are multiples of {size}, "
                    f"{self.key(fact)} is {getattr(self, fact)}"
                )
        mixture = self.traits.mixture
        for what, columns in (("an expert", mixture.width), ("the shared expert", mixture.shared)) if mixture else ():
            if columns % size:
                raise ConfigError(
                    f"config.json: weights in groups of {size} need sizes that are multiples of {size}, {what} has "
                    f"{columns} columns"
                )

    def _check_products(self) -> None:
        """No matrix may be so large that its bytes can't be counted."""
        rows = {fact: getattr(self, fact) for fact in ("vocab_size", "ffn_hidden", "max_positions", "hidden_size")}
        rows |= {"heads": self.heads * self.head_dim}
        for fact, count in rows.items():
            if count * self.hidden_size > MOST_ELEMENTS:
                raise ConfigError(
                    f"config.json: {self.key(fact)}={getattr(self, fact)} and {self.key('hidden_size')}="
                    f"{self.hidden_size} make a matrix of {count * self.hidden_size} numbers, beyond any memory"
                )

    def _check_ids(self) -> None:
        for fact, ids in (("eos_ids", self.eos_ids), ("bos_id", () if self.bos_id is None else (self.bos_id,))):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(
                        f"config.json: {self.key(fact)}={token!r:.40} is outside the vocabulary of {self.vocab_size}; "
                        f"expected 0 to {self.vocab_size - 1}, or null for none"
                    )

    @property
    def has_learned_positions(self) -> bool:
        """Whether each position has a row of a table: where nothing else tells positions apart."""
        return not self.rope_theta and not self.traits.alibi

    @property
    def cached_positions(self) -> int:
        """How long a text may become over a KV cache: where RoPE's angles depend on a text's length, no longer than the
        length from which they change, since the keys before were turned by others.
        """
        scalings = [
            each for each in (self.rope_scaling, self.traits.local_scaling) if each and kind_of(each) in BY_LENGTH
        ]
        return min([self.max_positions, *(int(scaling[ORIGINAL_LENGTH]) for scaling in scalings)])

    def of_blocks(self, blocks: range) -> DecoderConfig:
        """The config of a model of these blocks alone."""
        return replace(self, num_layers=len(blocks), traits=self.traits.of_blocks(blocks))

    def key(self, fact: str) -> str:
        """What config.json calls one of these fields."""
        return file_key(self.model_type, fact)


def refuse_slips(model_type: str, unread: Mapping[str, str], own: Collection[str]) -> None:
    """Raise ConfigError for a key that the user has written here and now (one of `own`) and that nobody reads."""
    for key, near in unread.items():
        if key in own:
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"config.json: unknown key {key!r} for model_type {model_type!r}{hint}")


_MISSING: Any = object()


class HfConfigReader:
    """Takes typed values out of a config.json and at the end refuses what nobody took."""

    def __init__(self, raw: Mapping[str, Any], required: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """`required`: keys that the model type reads, and the values with which they change nothing; None: those of a
        decoder.
        """
        self.model_type = str(raw.get("model_type"))
        self.required = required_values(self.model_type) if required is None else required
        self.raw_as_given = raw
        self.raw, self._taken = _without_aliases(raw, ALIASES.get(self.model_type, {})), set[str]()
        self.passed_over: list[str] = []  # keys, or parts of them, that a notice names
        self.unread: dict[str, str] = {}  # the keys that nobody reads, and the known one that each resembles

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A whole number."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config.json: {key} must be a whole number, got {value!r:.60}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number."""
        value = self._take(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) < MOST_NUMBER  # nor NaN, nor a whole number beyond what a float holds
        ):
            raise ConfigError(f"config.json: {key} must be a finite number, got {value!r:.60}")
        return float(value)

    def rate(self, key: str, default: float) -> float:
        """A dropout rate, 0 <= rate < 1."""
        value = self.number(key, default)
        if not 0 <= value < 1:
            raise ConfigError(f"config.json: {key} must lie in [0, 1), got {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {value!r:.60}")
        return value

    def expect(self, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """A value of which only some are implemented."""
        value = self._take(key, default)
        if value not in allowed:
            raise ConfigError(
                f"config.json: {key}={value!r:.60} is not supported; supported: {', '.join(map(repr, allowed))}"
            )
        return value

    def take(self, key: str) -> Any:
        """Whatever the file has; None where it has nothing."""
        return self._take(key, None)

    def mapping(self, key: str) -> dict[str, Any] | None:
        """A nested object, or None."""
        value = self._take(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {key} must be an object or null, got {value!r:.60}")
        return dict(value) if value is not None else None

    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-text ids: one, several or none."""
        value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            self._check_id("eos_token_id", token)
        return tuple(ids)

    def bos_id(self) -> int | None:
        """The begin-of-text id, or None."""
        value = self.raw.get("bos_token_id")
        if value is not None:
            self._check_id("bos_token_id", value)
        return value

    def finish(self, max_positions: int) -> None:
        """Sort the keys that were not taken: refuse those with values that change the maths, note the others."""
        key = windows_differ(self.raw, max_positions)
        if key and key not in self._taken:
            raise ConfigError(
                f"config.json: {key}={self.raw[key]!r:.60} is not supported: every layer must see all that came "
                "before (only full_attention is)"
            )
        required = self.required
        for key, value in self.raw.items():
            if key in self._taken:
                continue
            if key in required and value is not None and value not in required[key]:
                allowed = required[key][0] if required[key] else None
                raise ConfigError(f"config.json: {key}={value!r:.60} is not supported; supported: {allowed!r}")
            if key not in HARMLESS_KEYS or value not in (None, *QUIET_VALUES.get(key, (value,))):
                self.passed_over.append(key)
            if key not in HARMLESS_KEYS and key not in required:
                self.unread[key] = self._near(key) if len(self.unread) < MOST_HINTS else ""

    def refuse_unless(self, key: str, value: Any, neutral: Any) -> None:
        """Raise ConfigError for a value, of a part of a key, that changes the maths."""
        if value is not None and value != neutral:
            raise ConfigError(f"config.json: {key}={value!r:.60} is not supported; supported: {neutral!r}")

    def notices(self) -> list[str]:
        """What is to be said about the file, after `finish`."""
        if not self.passed_over:
            return []
        missed = [f"{near!r} for {key!r}" for key, near in self.unread.items() if near and near not in self.raw]
        hint = f" (was {', '.join(missed)} meant?)" if missed else ""
        return [
            f"config.json: passed over, since they don't change the maths of model_type {self.model_type!r}: "
            f"{named(self.passed_over)}{hint}"
        ]

    def without_default_ids(self, token: int) -> None:
        """Drop bos and eos that transformers has written unasked, its class's default, into a smaller model's file."""
        vocab_size = self.raw.get("vocab_size")
        if isinstance(vocab_size, int) and vocab_size <= token:
            dropped = [key for key in ("bos_token_id", "eos_token_id") if self.raw.get(key) == token]
            self.raw = {**self.raw, **dict.fromkeys(dropped)}
            self.passed_over += [f"{key}: {token}" for key in dropped]

    def _near(self, key: str) -> str:
        """The known key that another one resembles, or ""."""
        return next(iter(difflib.get_close_matches(key[:MOST_HINTS], self._taken, n=1, cutoff=0.8)), "")

    def _check_id(self, key: str, token: Any) -> None:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"config.json: {key} must be made of whole numbers, got {token!r:.60}")

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        value = self.raw.get(key, _MISSING)
        if value is _MISSING or (value is None and default is not _MISSING):
            if default is _MISSING:
                raise ConfigError(f"config.json: {key} is missing")
            return default
        return value


def _without_aliases(raw: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The file's keys under the names that its model type reads; a key and its alias must not contradict each other."""
    named_once = {key: value for key, value in raw.items() if key not in aliases}
    for alias, key in aliases.items():
        value = raw.get(alias)
        if value is not None and raw.get(key) not in (None, value):
            raise ConfigError(f"config.json: {alias}={value!r:.40} contradicts {key}={raw[key]!r:.40}; one must go")
        if value is not None:
            named_once[key] = value
    return named_once
