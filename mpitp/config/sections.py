"""The sections of a run file, each key with its meaning beside its type."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpitp.config.rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    BETAS,
    COUNTS,
    DURATION,
    GROUP,
    NOT_EMPTY,
    PART,
    POSITIVE,
    RECOMPUTE,
    SEED,
    SHARES,
    SIGNALS,
    ZERO,
    one_of,
)
from mpitp.config.section import Section, key, key_name, make_section, own_fields
from mpitp.config.values import Shares, show
from mpitp.errors import ConfigError

DTYPES = ("float32", "float64", "bfloat16", "float16")
ACTIVATIONS = ("auto", "int8", "float")  # beside weights in 8 or 4 bits (models/activations.py)
ACTIVATIONS_HELP = (
    "beside weights in 8 or 4 bits: int8 rounds activations too, which is faster; default auto: int8 in float32 on a "
    "CPU, but not with --invariant"
)


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

    @classmethod
    def take_extras(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The dropout table and, where `model_type` is given, the model's own fields."""
        extras: dict[str, Any] = {}
        if "dropout" in values:
            table = values.pop("dropout")
            if not isinstance(table, Mapping):
                raise ConfigError(f"model.dropout must be a table such as {{ resid = 0.1 }}, but is {show(table)}")
            extras["dropout"] = make_section(DropoutSection, table)
        if "model_type" in values:
            known = [key_name(field) for field in own_fields(cls)]
            extras["fields"] = {name: values.pop(name) for name in list(values) if name not in known}
            for name in extras["fields"]:  # the model knows its own fields; here only a slip of one of ours is caught
                if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
                    raise ConfigError(f'unknown key model.{name}: did you mean "{close[0]}"?')
        return extras


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
                f"mesh.shares = {show(self.shares)} is for a number of ranks, which mesh.plan = 'auto' chooses; "
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
