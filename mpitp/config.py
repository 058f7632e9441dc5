"""What a run file says: what to train, on what, and how; checked whole before anything is computed.

Each section is a frozen dataclass that checks its own values when it is made, so a configuration built in Python is
held to the same rules as one read from a file. Every key's meaning stands beside its type; `key_table()` prints them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpitp.errors import ConfigError

PATHS_NOTE = (
    "Paths are relative to the current directory (where the command is started), as on any command line;\n"
    "~ and $NAME are expanded, $$ is a dollar sign."
)

MOST_WHOLE = 2**63 - 1  # as TOML has it
MOST_NUMBER = sys.float_info.max
MOST_BATCH = 1 << 24
Table = tuple[tuple[float, ...], ...]  # rows of numbers
Shares = str | dict[str, tuple[float, ...]]  # a word, or weights of the ranks by axis
SHARED_AXES = ("pp", "dp", "ep", "tp")
DTYPES = ("float32", "float64", "bfloat16", "float16")


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


def key(help: str, default: Any = dataclasses.MISSING, rule: Rule | None = None, *, is_path: bool = False) -> Any:
    """A dataclass field with its one-line meaning and its rule; without a default the key is required."""
    return dataclasses.field(default=default, metadata={"help": help, "rule": rule, "is_path": is_path})


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
    from_: str | None = key("Hugging Face directory to start from, weights included", None, NOT_EMPTY, is_path=True)
    config: str | None = key(
        "a config.json (or the directory with it) to train from scratch", None, NOT_EMPTY, is_path=True
    )
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # model_type, hidden_size, ...: HF names
    dtype: str = key("what weights and activations are kept in", "float32", one_of(*DTYPES))
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
class TaskSection(Section):
    """What is learnt."""

    section: ClassVar[str] = "task"
    kind: str = key(
        "next or masked tokens, classes of texts, words or images, translations",
        "text",
        one_of("text", "masked", "classification", "token-classification", "image", "translation"),
    )
    mask_rate: float = key("masked: how many of the tokens are to be told", 0.15, PART)


@dataclass(frozen=True)
class DataSection(Section):
    """What is read. Prepared data carries its tokenizer; labelled texts take the model's."""

    section: ClassVar[str] = "data"
    train: str = key(
        "directory made by `mpitp data prepare`; labelled texts, images: the file or folder",
        rule=NOT_EMPTY,
        is_path=True,
    )
    seq_len: int = key("tokens a sequence", rule=AT_LEAST_1)
    valid: str | None = key("directory with held-out text, made by `mpitp data prepare`", None, NOT_EMPTY, is_path=True)
    valid_sequences: int = key("how many held-out sequences are measured (0: all)", 64, AT_LEAST_0)
    tokenizer: str | None = key(
        "labelled texts, for a model from scratch: a directory with tokenizer.json, or bytes",
        None,
        NOT_EMPTY,
        is_path=True,
    )


@dataclass(frozen=True)
class MeshSection(Section):
    """How the ranks are arranged."""

    section: ClassVar[str] = "mesh"
    tp: int = key("tensor-parallel ranks (0: all that the other axes leave)", 0, AT_LEAST_0)
    pp: int = key("pipeline stages", 1, AT_LEAST_1)
    schedule: str = key("in which order stages compute", "1f1b", one_of("gpipe", "1f1b", "interleaved", "zb"))
    chunks: int = key("parts of the model a stage has (0: 2 if interleaved, else 1)", 0, AT_LEAST_0)
    stages: tuple[int, ...] = key("blocks of each part, in order (empty: dealt by cost)", (), COUNTS)
    dp: int = key("data-parallel replicas", 1, AT_LEAST_1)
    ep: int = key("expert-parallel ranks: replicas that deal the experts", 1, AT_LEAST_1)
    cp: int = key("context-parallel ranks", 1, AT_LEAST_1)
    cp_form: str = key("how cp ranks exchange: keys in a ring, or rows for heads", "ring", one_of("ring", "heads"))
    sequence_parallel: bool = key("cut norms, dropout and residuals by tokens over tp", False)
    shares: Shares = key(
        'what ranks get: "equal", as "measured", weights along tp, { pp = [...], tp = [...] }', "equal", SHARES
    )
    plan: str = key(
        "auto: mpitp train searches axes, schedule, microbatch, recompute, zero", "given", one_of("given", "auto")
    )
    machine: str | None = key("for plans: the machine's file, of mpitp bench machine", None, NOT_EMPTY, is_path=True)
    group: str = key('a group of your own around the library\'s, "my.module:Class" or "file.py:Class"', "", GROUP)

    @property
    def weights(self) -> dict[str, tuple[float, ...]]:
        """Of the ranks along each axis that says; none where they are equal, or not measured yet."""
        return self.shares if isinstance(self.shares, dict) else {}

    @property
    def replicas(self) -> int:
        """Ranks that have different microbatches: along dp and ep."""
        return self.dp * self.ep

    @property
    def num_chunks(self) -> int:
        """Parts of the model that a stage has; never 0."""
        return self.chunks or (2 if self.schedule == "interleaved" and self.pp > 1 else 1)

    def check(self) -> None:
        if self.plan == "auto" and self.weights:
            raise ConfigError(
                f"mesh.shares = {_show(self.shares)} is for a number of ranks, which mesh.plan = 'auto' chooses; "
                'set mesh.shares = "measured", or leave out one of the two'
            )
        is_interleaved = self.schedule == "interleaved"
        if self.chunks and self.pp > 1 and is_interleaved != (self.chunks > 1):
            raise ConfigError(
                f'mesh.chunks = {self.chunks} with mesh.schedule = "{self.schedule}": a stage has several parts of the '
                'model when it is "interleaved", and one otherwise; leave mesh.chunks out, or change the schedule'
            )
        if self.pp == 1 and (self.chunks > 1 or len(self.stages) > 1):
            what = f"mesh.stages = {list(self.stages)}" if len(self.stages) > 1 else f"mesh.chunks = {self.chunks}"
            raise ConfigError(f"{what} cuts the model into parts, but mesh.pp = 1; set mesh.pp, or leave it out")


@dataclass(frozen=True)
class TrainSection(Section):
    """How long, how much at once, and where results go."""

    section: ClassVar[str] = "train"
    steps: int = key("optimizer steps", rule=AT_LEAST_1)
    run_dir: str = key("where metrics.jsonl and model/ are written", rule=NOT_EMPTY, is_path=True)
    micro_batch_size: int = key("sequences in one forward pass", 1, AT_LEAST_1)
    global_batch_size: int = key("sequences a step (0: micro_batch_size a replica and stage)", 0, AT_LEAST_0)
    seed: int = key("decides initial weights, data order and dropout, in every layout alike", 1, SEED)
    device: str = key("where arrays live", "cpu", one_of("cpu", "gpu"))
    eval_every: int = key("steps between held-out losses (0: at the end only)", 0, AT_LEAST_0)
    log_every: int = key("steps between lines of metrics.jsonl", 1, AT_LEAST_1)
    recompute: str = key("what backward computes again: none, attention, full, every:2", "none", RECOMPUTE)
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
    zero: int = key("what dp ranks deal: 1 optimizer state, 2 gradients too, 3 weights too", 0, ZERO)
    bucket_mib: float = key("MiB of gradients that are summed at once", 4.0, POSITIVE)

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
    task: TaskSection = dataclasses.field(default_factory=TaskSection)

    def __post_init__(self) -> None:
        if self.mesh.cp > 1:
            self._check_context()
        if self.mesh.sequence_parallel and self.train.invariant:
            raise ConfigError(
                "mesh.sequence_parallel and train.invariant can't both be true: where tokens are cut depends on the "
                "number of ranks, and with it the order in which the gradients of norms and biases are summed"
            )
        if self.global_batch_size > MOST_BATCH:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} sequences a step: expected at most {MOST_BATCH}"
            )
        if self.train.steps * self.global_batch_size > MOST_WHOLE:
            raise ConfigError(
                f"train.steps={self.train.steps} of {self.global_batch_size} sequences each: expected below 2^63 in all"
            )
        if self.mesh.plan == "given":  # a layout that is searched has the ZeRO that goes with it
            self._check_zero()
        if self.train.eval_every and not self.data.valid:
            raise ConfigError(
                f"train.eval_every={self.train.eval_every} needs held-out text: set data.valid "
                "(`mpitp data prepare --valid-fraction 0.05` makes it), or leave eval_every out"
            )

    def _check_zero(self) -> None:
        """ZeRO deals to replicas, and an invariant sum is made of whole gradients."""
        zero = self.optim.zero
        if zero and self.mesh.replicas * self.mesh.cp == 1:
            raise ConfigError(
                f"optim.zero={zero} deals the optimizer's state to data-parallel ranks, but mesh.dp=1: there is one "
                "copy of it anyway; set mesh.dp to the number of replicas (2 or more; mesh.cp counts too), or "
                "optim.zero=0"
            )
        if zero > 1 and self.train.invariant:
            raise ConfigError(
                f"optim.zero={zero} adds gradients rows by rows as they come, in another order at another mesh.dp; "
                "train.invariant=true needs the order of the microbatches: set optim.zero=1 or 0"
            )

    def _check_context(self) -> None:
        """What `mesh.cp` needs."""
        cp, length = self.mesh.cp, self.data.seq_len
        if self.train.invariant:
            raise ConfigError(
                f"mesh.cp={cp} and train.invariant can't go together: where sequences are cut decides in which pieces "
                "gradients are added up; set mesh.cp = 1 and give the ranks to mesh.dp or mesh.tp"
            )
        if length < 2 * cp and self.task.kind != "image":
            raise ConfigError(
                f"mesh.cp={cp} cuts each sequence into 2 * {cp} = {2 * cp} pieces, but data.seq_len={length} has only "
                f"{length} tokens; use mesh.cp = {max(1, length // 2)} or fewer, or longer sequences"
            )

    @property
    def global_batch_size(self) -> int:
        """Sequences a step; never 0."""
        return self.train.global_batch_size or self.train.micro_batch_size * self.mesh.replicas * self.mesh.pp


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "task": TaskSection,
    "data": DataSection,
    "mesh": MeshSection,
    "train": TrainSection,
    "optim": OptimSection,
    "checkpoint": CheckpointSection,
}


def run_config_from(tables: Mapping[str, Any]) -> RunConfig:
    """The checked configuration from nested dictionaries, as TOML gives them."""
    for name, table in tables.items():
        if name not in SECTIONS:
            raise ConfigError(f"unknown section [{name}]{_nearest(name, SECTIONS)}; {_list('sections', SECTIONS)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} must be a section, written [{name}], but is {_show(table)}")
    if tables.get("task", {}).get("kind") == "image" and "data" in tables:  # images have as many tokens as patches
        tables = {**tables, "data": {"seq_len": 1, **tables["data"]}}
    sections = {name: make_section(cls, tables.get(name, {})) for name, cls in SECTIONS.items()}
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


def make_section(cls: type[Section], table: Mapping[str, Any]) -> Section:
    """A checked section from its table, as TOML gives it. Raises ConfigError for unknown, missing and wrong keys."""
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
        extras["dropout"] = make_section(DropoutSection, values.pop("dropout"))
    elif "dropout" in values:
        raise ConfigError(f"model.dropout must be a table such as {{ resid = 0.1 }}, but is {_show(values['dropout'])}")
    if "model_type" in values:
        extras["fields"] = {name: values.pop(name) for name in list(values) if name not in known}
        for name in extras["fields"]:  # the model knows its own fields; here only a slip of one of ours is caught
            if close := difflib.get_close_matches(name, list(known), n=1, cutoff=0.8):
                raise ConfigError(f'unknown key model.{name}: did you mean "{close[0]}"?')
    return extras


def _checked(label: str, value: Any, wanted: Any, field: dataclasses.Field[Any]) -> Any:
    """The value in its field's type, or a ConfigError that says what was expected and what came."""
    rule: Rule | None = field.metadata["rule"]
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) and wanted != Shares else (wanted,)
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
    if kind == tuple[int, ...]:
        counts = [_convert(x, int) for x in value] if isinstance(value, list | tuple) else [None]
        return None if None in counts else tuple(counts)
    if kind == Table:
        rows = [_floats(row) for row in value] if isinstance(value, list | tuple) else [None]
        return None if None in rows else tuple(rows)
    if kind == Shares:
        return _shares(value)
    if typing.get_origin(kind) is tuple:
        numbers = _floats(value)
        return numbers if numbers is not None and len(numbers) == len(typing.get_args(kind)) else None
    if isinstance(value, bool) and kind is not bool:
        return None
    if kind is float:
        return float(value) if isinstance(value, int | float) and abs(value) <= MOST_NUMBER else None
    if kind is int and isinstance(value, int) and not -MOST_WHOLE <= value <= MOST_WHOLE:
        return None
    return value if isinstance(value, kind) else None


def _floats(value: Any) -> tuple[float, ...] | None:
    if not isinstance(value, list | tuple):
        return None
    numbers = [number for x in value if (number := _convert(x, float)) is not None]
    return tuple(numbers) if len(numbers) == len(value) else None


def _shares(value: Any) -> Shares | None:
    """A list alone is that of tp."""
    if isinstance(value, str):
        return value if value in ("equal", "measured") else None
    if not isinstance(value, Mapping):
        value = {"tp": value}
    found = {axis: _floats(own) for axis, own in value.items()}
    return None if set(found) - set(SHARED_AXES) or not all(found.values()) else found  # type: ignore[return-value]


def _type_words(kind: Any) -> str:
    if kind == tuple[str, ...]:
        return "a list of words"
    if kind == tuple[int, ...]:
        return "a list of whole numbers"
    if kind == Table:
        return "a list of rows of numbers"
    if kind == Shares:
        axes = ", ".join(SHARED_AXES)
        return f'"equal", "measured", a list of one weight for each rank along tp, or such lists for {axes} in a table,'
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))} numbers"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}
    return words[kind]


def _type_hint(value: Any, kind: Any) -> str:
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) <= MOST_WHOLE:
        return f", written {int(value)}"
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST_WHOLE:
        return ", below 2^63"
    return ""


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return "a whole number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def keys_of(cls: type[Section], wanted: Callable[[dataclasses.Field[Any], Any], bool]) -> list[str]:
    """The keys of a section whose field and type `wanted` accepts."""
    hints = typing.get_type_hints(cls)
    return [_key_name(field) for field in _own_fields(cls) if wanted(field, hints[field.name])]


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
