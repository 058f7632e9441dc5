"""The checkpoints of one run: when they are saved, what is in them, and how a run goes on from one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitp import __version__
from mpitp.backend.accelerator import accelerator_in_use
from mpitp.backend.precision import wide_dtype
from mpitp.checkpoint.existing import checkpoints, find_damage, newest_whole, read_state, set_aside
from mpitp.checkpoint.hf import NamedModel
from mpitp.checkpoint.manifest import FORMAT
from mpitp.checkpoint.together import on_first_rank, together
from mpitp.checkpoint.training import ArraysAs, BackgroundSave, Contents, Save, frozen, load_arrays
from mpitp.comm.group import Group
from mpitp.config import SECTIONS, SHARED_AXES, RunConfig
from mpitp.error_stream import tell
from mpitp.errors import ConfigError, FileError
from mpitp.layers.param import Param
from mpitp.models.any_config import AnyConfig
from mpitp.models.config import file_key
from mpitp.models.layered import LayeredModel
from mpitp.models.names import HfPiece
from mpitp.optim.adamw import AdamW
from mpitp.train.directory import CHECKPOINTS, Plan, RunDirectory
from mpitp.train.facts import flat, plain
from mpitp.train.finite import refuse_spoilt
from mpitp.train.log import check_log
from mpitp.train.task import Task

# What a resumed run may change; everything else decides what the numbers mean.
MAY_CHANGE = (
    "train.steps", "train.run_dir", "train.device", "train.eval_every", "train.log_every", "train.overwrite",
    "train.signals", "train.stop_after", "train.watchdog", "train.micro_batch_size", "train.recompute",
    "train.invariant", "train.invariant_blocks", "model.from", "model.config", "model.save_dtype", "data.train",
    "data.valid", "data.valid_sequences", "mesh.tp", "mesh.pp", "mesh.dp", "mesh.ep", "mesh.cp",
    "mesh.cp_form", "mesh.sequence_parallel", "mesh.schedule", "mesh.chunks", "mesh.stages",
    "mesh.plan", "mesh.machine", "mesh.group", "mesh.shares", *(f"mesh.shares.{axis}" for axis in SHARED_AXES),
    "optim.lr", "optim.clip_norm", "optim.zero", "optim.bucket_mib",
    "optim.weight_decay", "optim.warmup_steps", "optim.schedule", "optim.min_lr", "checkpoint.every", "checkpoint.keep",
    "checkpoint.background",
)  # fmt: skip


class RunCheckpoints:
    """Saves and finds the checkpoints of the run in `config.train.run_dir`."""

    def __init__(self, config: RunConfig, task: Task, group: Group) -> None:
        self.config, self.task, self.group = config, task, group
        self.model_config = task.model_config
        self.directory = RunDirectory(config)
        self.root = self.directory.checkpoints
        self.slowest_seconds = 0.0  # from the beginning of a save until it was published
        self._background: BackgroundSave | None = None
        self._last: Save | None = None
        self._saved_step = 0
        self.tell = self._say  # lines while the run goes on, which has a place of its own for them

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after `step`."""
        every = self.config.checkpoint.every
        return bool(every) and (step % every == 0 or step == self.config.train.steps)

    def save(
        self, step: int, model: LayeredModel, optimizer: AdamW, *, log_lines: int = 0, wait: bool = False
    ) -> float:
        """Save after `step`; the seconds for which training stood still. A collective.

        With `[checkpoint] background`, only the state is copied now, unless `wait`. `log_lines`: that the log has now,
        as the first rank knows it.
        """
        started = time.perf_counter()
        self.finish()
        if self._saved_step == step:
            return time.perf_counter() - started
        refuse_spoilt(optimizer, step, self.group)
        background = self.config.checkpoint.background and not wait
        contents = self._contents(step, model, optimizer, log_lines)
        contents = frozen(contents) if background else contents
        save = Save(self.root, step, contents, self.group, self.config.checkpoint.keep)
        if background:
            self._background = BackgroundSave(save)
        else:
            save.run()
            self._published(save, time.perf_counter() - started)
        self._saved_step = step
        return time.perf_counter() - started

    def advance(self, *, wait: bool = False) -> None:
        """Move a save in the background on; call it at every step's boundary. A collective while one is under way."""
        if self._background is not None and self._background.advance(wait=wait):
            self._published(self._background.save, self._background.seconds)
            self._background = None

    def finish(self) -> None:
        """Wait for a save in the background, and until old ones are gone. A collective while one is under way."""
        self.advance(wait=True)
        if self._last is not None:
            for line in self._last.wait_for_removal():
                self.tell(line)
            self._last = None

    def resume(self, wish: str, plan: Plan, model: LayeredModel, optimizer: AdamW) -> int:
        """Load the checkpoint that `wish` names ("auto": the newest whole one); its step, 0 when "auto" finds none."""
        path = self._chosen(wish)
        if path is None:
            return 0
        state = together(self.group, lambda: read_state(path))
        if plan.goes_on:
            on_first_rank(self.group, lambda: check_log(self.directory.log, state["step"], _log_lines(state), path))
        changes = compare_states(state, self._state(state["step"]), path)
        for line in changes:
            self._say(f"resuming with another {line}")
        together(self.group, lambda: load_arrays(path, exact_weights(model, optimizer), _moments(optimizer)))
        optimizer.round_masters()
        optimizer.loss_scale.restore(state.get("loss_scale"))
        self._saved_step = state["step"]
        optimizer.steps_done = state["step"] - optimizer.loss_scale.skipped
        self._set_aside_after(state["step"])
        self._say(f"resumed from {path} after step {state['step']}")
        return int(state["step"])

    def _chosen(self, wish: str) -> Path | None:
        if wish != "auto":
            return self._named(Path(wish))
        path = newest_whole(self.root, self.group, self._say)
        damaged = on_first_rank(self.group, lambda: checkpoints(self.root)) if path is None else []
        if damaged and not self.config.train.overwrite:
            raise FileError(
                f"none of the {len(damaged)} checkpoints in {self.root} is whole, so there is nothing to go on from; "
                "move them away, or start again from the first step with --set train.overwrite=true"
            )
        if damaged:
            self._set_aside_after(0)
        return path

    def _named(self, path: Path) -> Path:
        """The checkpoint at `path`, or the newest whole one of a run's `checkpoints`, or of a run's directory."""
        folder = on_first_rank(self.group, lambda: _folder_of_checkpoints(path))
        damage = find_damage(path, self.group) if folder is None else "none of its checkpoints is whole"
        found = path if folder is None else newest_whole(folder, self.group, self._say)
        if found is None or (folder is None and damage is not None):
            raise FileError(
                f"{path} can't be resumed from: {damage}. (To start a new run from a model's weights, name its "
                "directory as model.from.)"
            )
        return found

    def _set_aside_after(self, step: int) -> None:
        """Rename this run's checkpoints of later steps: they are damaged, or of steps that will be taken again."""

        def rename() -> list[Path]:
            later = [path for path in checkpoints(self.root) if int(path.name.removeprefix("step-")) > step]
            set_aside(later)
            return later

        for path in on_first_rank(self.group, rename):
            self._say(f"{path} is of a later step than the one resumed from; it is now aside-{path.name}")

    def _published(self, save: Save, seconds: float) -> None:
        self._last, self.slowest_seconds = save, max(self.slowest_seconds, seconds)
        if self.group.rank == 0:
            self.directory.has_saved()

    def _contents(self, step: int, model: LayeredModel, optimizer: AdamW, log_lines: int) -> Contents:
        generation = {"eos_token_id": list(self.model_config.eos_ids)} if self.model_config.eos_ids else None
        return Contents(
            model=exact_weights(model, optimizer),
            moments=_moments(optimizer),
            dtype=str(wide_dtype(model.dtype)),
            config=self.model_config.hf,
            state=self._state(step) | {"log_lines": log_lines} | _scaling(optimizer),
            documents={"generation_config.json": generation},
            files=self.task.files,
            companions=(self.directory.log,),
        )

    def _state(self, step: int) -> dict[str, Any]:
        run = plain(dataclasses.asdict(self.config))
        run["train"]["global_batch_size"] = self.config.global_batch_size  # 0 follows what may change
        return {
            "format": FORMAT,
            "mpitp": __version__,
            "step": step,
            "samples_seen": step * self.config.global_batch_size,
            "seed": self.config.train.seed,
            "data_sha256": self.task.sha256,
            "model": _model_facts(self.model_config),
            "run": run,
            "arithmetic": arithmetic(),
        }

    def _say(self, line: str) -> None:
        if self.group.rank == 0:
            tell([line])


@dataclasses.dataclass(frozen=True, slots=True)
class Updated:
    """What an optimizer updates, under the model's names in the files."""

    model: LayeredModel
    optimizer: AdamW

    def named_params(self) -> Iterator[tuple[str, Param]]:
        """The optimizer's parameters: the model's, or this rank's rows of them."""
        return iter(self.optimizer.params)

    def hf_pieces(self) -> Mapping[tuple[str, str], HfPiece]:
        """The model's own table."""
        return self.model.hf_pieces()


def compare_states(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> list[str]:
    """What differs and may, as lines for people. Raises ConfigError listing what differs and may not."""
    old, new = flat(saved), flat(wanted)
    ignored = ("mpitp", "run.model.fields", "samples_seen", "log_lines", "loss_scale")
    allowed: list[str] = []
    refused: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) == new.get(name) or name.startswith(ignored) or _is_new_default(name, old, new):
            continue
        if name.startswith("arithmetic."):  # it changes the last bits alone; earlier versions don't tell
            if name in old:
                allowed.append(f"{name.partition('.')[2]}: {old[name]}, now {new.get(name, 'not there')}")
            continue
        key = _user_s_key(name, wanted)
        line = f"{key}: {_word(old, name)}, now {_word(new, name)}"
        (allowed if key in MAY_CHANGE else refused).append(line)
    if refused:
        raise ConfigError(
            f"{path} is of another run: " + "; ".join(refused) + ". These can't change within a run; "
            "start a new one from its weights with model.from and another train.run_dir"
        )
    return allowed


def _user_s_key(name: str, state: Mapping[str, Any]) -> str:
    """What the user's file calls an entry of the state: a key of the run file, or of the model's config.json."""
    section, _, fact = name.partition(".")
    if section == "model" and isinstance(state.get("model"), Mapping):
        return f"model.{file_key(state['model'].get('model_type', ''), fact)}"
    return name.removeprefix("run.")


def _is_new_default(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a key of the run file is younger than the checkpoint, and says what was so before it existed."""
    section, _, key = name.removeprefix("run.").rpartition(".")
    if name in old or section not in SECTIONS:
        return False
    fields: Any = dataclasses.fields(SECTIONS[section])  # type: ignore[arg-type]
    defaults = {field.name.rstrip("_"): field.default for field in fields}
    return key in defaults and new.get(name) == plain(defaults[key])


def _word(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not there"


def _scaling(optimizer: AdamW) -> dict[str, Any]:
    scale = optimizer.loss_scale
    return {"loss_scale": scale.state()} if scale.is_dynamic else {}


def exact_weights(model: LayeredModel, optimizer: AdamW) -> NamedModel:
    """What the optimizer updates of the model, this rank's rows of it, with the masters in the place of what is stored
    in 16 bits. All ranks' together are the model.
    """
    return ArraysAs(Updated(model, optimizer), {name: optimizer.weights(name, p) for name, p in optimizer.params})


def _moments(optimizer: AdamW) -> dict[str, dict[str, Any]]:
    """AdamW's state under PyTorch's names."""
    return {
        "exp_avg": {name: m for name, (m, _) in optimizer.moments.items()},
        "exp_avg_sq": {name: v for name, (_, v) in optimizer.moments.items()},
    }


def arithmetic() -> dict[str, str]:
    """What the last bits depend on beside model, data and layout."""
    from threadpoolctl import threadpool_info  # importing it sets an environment variable

    blas = {
        " ".join(str(pool.get(key) or "") for key in ("internal_api", "version", "architecture")).strip()
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    }
    return {"accelerator": accelerator_in_use(), "NumPy": np.__version__, "BLAS": ", ".join(sorted(blas))}


def _model_facts(decoder: AnyConfig) -> dict[str, Any]:
    return plain({f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder) if f.compare})


def _log_lines(state: Mapping[str, Any]) -> int:
    """Lines that the log had when the checkpoint was saved; checkpoints of an earlier version don't tell."""
    lines = state.get("log_lines", 0)
    return lines if type(lines) is int else 0


def _folder_of_checkpoints(path: Path) -> Path | None:
    """The folder whose newest checkpoint is meant where `path` names no checkpoint itself; None: it must be one."""
    for folder in (path, path / CHECKPOINTS):
        if checkpoints(folder):
            return folder
    return None
