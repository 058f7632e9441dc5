"""A run's configuration as a whole: its sections, and the rules that involve several of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.config.section import Section, listed, make_section, nearest
from mpitp.config.sections import (
    CheckpointSection,
    DataSection,
    MeshSection,
    ModelSection,
    OptimSection,
    TaskSection,
    TrainSection,
)
from mpitp.config.values import MOST_WHOLE, show
from mpitp.errors import ConfigError

MOST_BATCH = 1 << 24  # sequences


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
            raise ConfigError(f"unknown section [{name}]{nearest(name, SECTIONS)}; {listed('sections', SECTIONS)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} must be a section, written [{name}], but is {show(table)}")
    if tables.get("task", {}).get("kind") == "image" and "data" in tables:  # images have as many tokens as patches
        tables = {**tables, "data": {"seq_len": 1, **tables["data"]}}
    sections = {name: make_section(cls, tables.get(name, {})) for name, cls in SECTIONS.items()}
    return RunConfig(**sections)  # type: ignore[arg-type]
