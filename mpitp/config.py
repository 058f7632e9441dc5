"""The run file: one TOML file that says what to train, on what, and how; checked whole before anything is computed.

Each section is a frozen dataclass that checks its own values when it is made, so a configuration built in Python is
held to the same rules as one read from a file. Every key's meaning stands beside its type; `key_table()` prints them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import signal
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mpitp.errors import ConfigError

PATHS_NOTE = "Paths are relative to the current directory (where the command is started), as on any command line."


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy beyond its type, and how that is said."""

    holds: Callable[[Any], bool]
    words: str


POSITIVE = Rule(lambda x: x > 0, "above 0")
AT_LEAST_1 = Rule(lambda x: x >= 1, "of at least 1")
AT_LEAST_0 = Rule(lambda x: x >= 0, "of at least 0")
BELOW_1 = Rule(lambda x: 0 <= x < 1, "from 0 up to, but not including, 1")
BETAS = Rule(lambda pair: all(0 <= x < 1 for x in pair), "each from 0 up to, but not including, 1")
SEED = Rule(lambda x: 0 <= x < 2**63, "from 0 to 2^63 - 1")
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


def one_of(*choices: str) -> Rule:
    """The value is one of the given words."""
    return Rule(lambda x: x in choices, "out of " + ", ".join(f'"{choice}"' for choice in choices))


def key(help: str, default: Any = dataclasses.MISSING, rule: Rule | None = None) -> Any:
    """A dataclass field with its one-line meaning and its rule; without a default the key is required."""
    return dataclasses.field(default=default, metadata={"help": help, "rule": rule})


class Section:
    """Checks every field of a section against its type and rule, once, when it is made."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        types_by_name = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "rule" not in field.metadata:
                continue
            value = _checked(
                f"{self.section}.{_key_name(field)}", getattr(self, field.name), types_by_name[field.name], field
            )
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Rules that involve several keys; a section without such rules keeps this one."""


@dataclass(frozen=True)
class DropoutSection(Section):
    """Dropout probabilities in place of those in the model's own configuration; None keeps the model's."""

    section: ClassVar[str] = "model.dropout"
    embd: float | None = key("after the embedding", None, BELOW_1)
    attn: float | None = key("on attention weights", None, BELOW_1)
    resid: float | None = key("on what a block adds to the residual stream", None, BELOW_1)


@dataclass(frozen=True)
class ModelSection(Section):
    """Which model: exactly one of `from`, `config` or the Hugging Face fields themselves (with `model_type`)."""

    section: ClassVar[str] = "model"
    from_: str | None = key("Hugging Face directory to start from, weights included", None, NOT_EMPTY)
    config: str | None = key("a config.json (or the directory with it) to train from scratch", None, NOT_EMPTY)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # model_type, hidden_size, ...: HF names
    dtype: str = key("what is computed and kept in memory", "float32", one_of("float32", "float64"))
    save_dtype: str = key("what the final model is stored in", "float32", one_of("float32", "bfloat16", "float16"))
    dropout: DropoutSection = dataclasses.field(default_factory=DropoutSection)

    def check(self) -> None:
        given = [
            name
            for name, value in [("from", self.from_), ("config", self.config), ("model_type", self.fields)]
            if value
        ]
        if len(given) != 1:
            came = " and ".join(f"model.{name}" for name in given) or "none of them"
            raise ConfigError(
                'say which model: exactly one of model.from = "hf/dir", model.config = "hf/config.json", or the '
                f'model\'s own fields with model.model_type = "llama" among them; {came} came'
            )
        if self.fields and not isinstance(self.fields.get("model_type"), str):
            raise ConfigError(
                f'model.model_type: expected a word such as "llama", got {self.fields.get("model_type")!r}'
            )


@dataclass(frozen=True)
class DataSection(Section):
    """What is read. The prepared data carries its tokenizer."""

    section: ClassVar[str] = "data"
    train: str = key("directory made by `mpitp data prepare`", rule=NOT_EMPTY)
    seq_len: int = key("tokens a sequence", rule=AT_LEAST_1)
    valid: str | None = key("directory with held-out text, made by `mpitp data prepare`", None, NOT_EMPTY)
    valid_sequences: int = key("how many held-out sequences are measured (0: all)", 64, AT_LEAST_0)


@dataclass(frozen=True)
class MeshSection(Section):
    """How the ranks are arranged."""

    section: ClassVar[str] = "mesh"
    tp: int = key("tensor-parallel ranks (0: all that the other axes leave)", 0, AT_LEAST_0)
    pp: int = key("pipeline stages", 1, AT_LEAST_1)
    dp: int = key("data-parallel replicas", 1, AT_LEAST_1)
    cp: int = key("context-parallel ranks", 1, AT_LEAST_1)


@dataclass(frozen=True)
class TrainSection(Section):
    """How long, how much at once, and where results go."""

    section: ClassVar[str] = "train"
    steps: int = key("optimizer steps", rule=AT_LEAST_1)
    run_dir: str = key("where metrics.jsonl and model/ are written", rule=NOT_EMPTY)
    micro_batch_size: int = key("sequences in one forward pass", 1, AT_LEAST_1)
    global_batch_size: int = key("sequences a step (0: micro_batch_size * mesh.dp)", 0, AT_LEAST_0)
    seed: int = key("decides initial weights, data order and dropout, in every layout alike", 1, SEED)
    device: str = key("where arrays live", "cpu", one_of("cpu", "gpu"))
    eval_every: int = key("steps between held-out losses (0: at the end only)", 0, AT_LEAST_0)
    log_every: int = key("steps between lines of metrics.jsonl", 1, AT_LEAST_1)
    invariant: bool = key("the same bits for every tensor-parallel size", False)
    invariant_blocks: int = key("blocks a summed dimension is cut into when invariant (0: chosen)", 0, AT_LEAST_0)
    overwrite: bool = key("replace what an earlier run left in run_dir", False)
    signals: tuple[str, ...] = key(
        "signals after which the run saves, stops and exits with 75", ("USR1", "TERM"), SIGNALS
    )
    stop_after: str = key('save, stop and exit with 75 after e.g. "1h50m" ("": no limit)', "", DURATION)
    watchdog: str = key("report late ranks when a collective takes this long, end at twice that", "30m", DURATION)

    def check(self) -> None:
        if self.global_batch_size % self.micro_batch_size:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} must be a multiple of "
                f"train.micro_batch_size={self.micro_batch_size}"
            )
        if self.invariant_blocks and not self.invariant:
            raise ConfigError(
                "train.invariant_blocks is set, but train.invariant is not true; set it, or drop the blocks"
            )


@dataclass(frozen=True)
class OptimSection(Section):
    """AdamW and its learning rate."""

    section: ClassVar[str] = "optim"
    lr: float = key("highest learning rate", 3e-4, POSITIVE)
    betas: tuple[float, float] = key("decay of the two moments", (0.9, 0.95), BETAS)
    eps: float = key("added to the root of the second moment", 1e-8, POSITIVE)
    weight_decay: float = key("decoupled decay of matrices (biases and norms have none)", 0.1, AT_LEAST_0)
    clip_norm: float = key("largest global gradient norm (0: no clipping)", 1.0, AT_LEAST_0)
    warmup_steps: int = key("steps of linear rise to lr", 0, AT_LEAST_0)
    schedule: str = key("after the warmup", "cosine", one_of("cosine", "constant"))
    min_lr: float = key("where the cosine ends", 0.0, AT_LEAST_0)

    def check(self) -> None:
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optim.min_lr={self.min_lr} is above optim.lr={self.lr}; it is where the learning rate ends"
            )


@dataclass(frozen=True)
class CheckpointSection(Section):
    """Checkpoints during the run."""

    section: ClassVar[str] = "checkpoint"
    every: int = key("steps between checkpoints, one more at the end (0: none but when stopped)", 0, AT_LEAST_0)
    keep: int = key("how many checkpoints stay", 2, AT_LEAST_1)
    background: bool = key("write checkpoints while training goes on", False)


@dataclass(frozen=True)
class RunConfig:
    """A whole run file."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)
    optim: OptimSection = dataclasses.field(default_factory=OptimSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)

    def __post_init__(self) -> None:
        together = self.train.micro_batch_size * self.mesh.dp
        if self.train.global_batch_size % together:
            raise ConfigError(
                f"train.global_batch_size={self.train.global_batch_size} must be a multiple of "
                f"train.micro_batch_size * mesh.dp = {together}"
            )
        if self.train.eval_every and not self.data.valid:
            raise ConfigError(
                f"train.eval_every={self.train.eval_every} needs held-out text: set data.valid "
                "(`mpitp data prepare --valid-fraction 0.05` makes it), or leave eval_every out"
            )

    @property
    def global_batch_size(self) -> int:
        """Sequences a step; never 0."""
        return self.train.global_batch_size or self.train.micro_batch_size * self.mesh.dp


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "mesh": MeshSection,
    "train": TrainSection,
    "optim": OptimSection,
    "checkpoint": CheckpointSection,
}


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply overrides such as "train.steps=100"; every mistake is one ConfigError."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read the run file {path}: {error.strerror or error}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    for override in overrides:
        _apply_override(tables, override)
    try:
        return run_config_from(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def run_config_from(tables: Mapping[str, Any]) -> RunConfig:
    """The checked configuration from nested dictionaries, as TOML gives them."""
    for name, table in tables.items():
        if name not in SECTIONS:
            raise ConfigError(f"unknown section [{name}]{_nearest(name, SECTIONS)}; {_list('sections', SECTIONS)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} must be a section, written [{name}], but is {_show(table)}")
    sections = {name: _make_section(cls, tables.get(name, {})) for name, cls in SECTIONS.items()}
    return RunConfig(**sections)  # type: ignore[arg-type]


def key_table() -> str:
    """Every key of the run file with its default and meaning, for `mpitp train --help`."""
    lines: list[str] = []
    for name, cls in SECTIONS.items():
        lines.append(f"[{name}]")
        rows = [(_key_name(field), field) for field in _own_fields(cls)]
        if cls is ModelSection:
            rows += [(f"dropout.{field.name}", field) for field in _own_fields(DropoutSection)]
        lines += [f"  {label:<18} {_default_words(field):<14} {field.metadata['help']}" for label, field in rows]
    lines.append(
        "In [model], the model's own Hugging Face fields (model_type, hidden_size, ...) may replace from and config."
    )
    lines.append(PATHS_NOTE)
    return "\n".join(lines)


def _make_section(cls: type[Section], table: Mapping[str, Any]) -> Section:
    known = {_key_name(field): field for field in _own_fields(cls)}
    values = dict(table)
    arguments: dict[str, Any] = {}
    if cls is ModelSection:
        arguments = _model_extras(values, known)
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown key {cls.section}.{name}{_nearest(name, known)}; {_list('keys', known)}")
    arguments.update({known[name].name: value for name, value in values.items()})
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{cls.section}.{name} is missing: {field.metadata['help']}")
    return cls(**arguments)


def _model_extras(values: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Take the dropout table and, when `model_type` is given, the model's own fields out of `values`."""
    extras: dict[str, Any] = {}
    if isinstance(values.get("dropout"), Mapping):
        extras["dropout"] = _make_section(DropoutSection, values.pop("dropout"))
    elif "dropout" in values:
        raise ConfigError(f"model.dropout must be a table such as {{ resid = 0.1 }}, but is {_show(values['dropout'])}")
    if "model_type" in values:
        extras["fields"] = {name: values.pop(name) for name in list(values) if name not in known}
        for name in extras["fields"]:  # the model knows its own fields; here only a slip of one of ours is caught
            if close := difflib.get_close_matches(name, list(known), n=1, cutoff=0.8):
                raise ConfigError(f'unknown key model.{name}: did you mean "{close[0]}"?')
    return extras


def _apply_override(tables: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is read as TOML, and as a bare string where it isn't TOML."""
    name, equals, text = override.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f'--set {override}: expected SECTION.KEY=VALUE, such as "train.steps=100"')
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
    table[parts[-1]] = _override_value(parts, text.strip())


def _override_value(parts: Sequence[str], text: str) -> Any:
    if _is_text_key(parts) and text[:1] not in ("'", '"'):
        return text  # a directory named 1 is still a directory
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def _is_text_key(parts: Sequence[str]) -> bool:
    cls = SECTIONS.get(parts[0])
    if cls is None or len(parts) != 2:
        return False
    hints = typing.get_type_hints(cls)
    return any(_key_name(field) == parts[1] and hints[field.name] in (str, str | None) for field in _own_fields(cls))


def _checked(label: str, value: Any, wanted: Any, field: dataclasses.Field[Any]) -> Any:
    """The value in its field's type, or a ConfigError that says what was expected and what came."""
    rule: Rule | None = field.metadata["rule"]
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if value is None and types.NoneType in kinds:
        return None
    converted = _convert(value, kinds[0])
    if converted is None or (rule and not rule.holds(converted)):
        expected = _type_words(kinds[0]) + (f" {rule.words}" if rule else "")
        raise ConfigError(
            f"{label} = {_show(value)}: expected {expected}{_type_hint(value, kinds[0])} ({field.metadata['help']})"
        )
    return converted


def _convert(value: Any, kind: Any) -> Any:
    """`value` as `kind`, or None where it isn't one. Integers count as floats; booleans are never numbers."""
    if kind == tuple[str, ...]:
        are_words = isinstance(value, list | tuple) and all(isinstance(x, str) for x in value)
        return tuple(value) if are_words else None
    if typing.get_origin(kind) is tuple:
        length = len(typing.get_args(kind))
        numbers = [_convert(x, float) for x in value] if isinstance(value, list | tuple) else []
        return tuple(numbers) if len(numbers) == length and None not in numbers else None
    if isinstance(value, bool) and kind is not bool:
        return None
    if kind is float:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    return value if isinstance(value, kind) else None


def _type_words(kind: Any) -> str:
    if kind == tuple[str, ...]:
        return "a list of words"
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))} numbers"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}
    return words[kind]


def _type_hint(value: Any, kind: Any) -> str:
    if kind is int and isinstance(value, float) and value.is_integer():
        return f", written {int(value)}"
    return ""


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _own_fields(cls: type[Section]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]  # type: ignore[arg-type]


def _key_name(field: dataclasses.Field[Any]) -> str:
    return field.name.rstrip("_")  # `from` is a word of Python, so its field is `from_`


def _default_words(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "(required)"
    if field.default is None:
        return "-"
    return _show(list(field.default)) if isinstance(field.default, tuple) else _show(field.default)


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f': did you mean "{close[0]}"?' if close else ""


def _list(what: str, known: typing.Iterable[str]) -> str:
    return f"known {what} are {', '.join(known)}"
