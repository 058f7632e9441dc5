"""The checkpoints of one run: when they are saved, what is in them, and how a run goes on from one."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitp import __version__
from mpitp.checkpoint.together import on_first_rank, together
from mpitp.checkpoint.training import (
    FORMAT,
    BackgroundSave,
    Contents,
    Save,
    checkpoints,
    find_damage,
    frozen,
    load_arrays,
    newest_whole,
    read_state,
    set_aside,
)
from mpitp.comm.group import Group
from mpitp.config import SECTIONS, RunConfig
from mpitp.errors import ConfigError, FileError
from mpitp.files import os_failure, write_file
from mpitp.models.config import DecoderConfig, file_key
from mpitp.models.model import CausalLM
from mpitp.optim.adamw import AdamW
from mpitp.train.setup import RunData

# What a resumed run may change; everything else decides what the numbers mean.
MAY_CHANGE = (
    "train.steps", "train.run_dir", "train.device", "train.eval_every", "train.log_every", "train.overwrite",
    "train.signals", "train.stop_after", "train.watchdog", "train.micro_batch_size", "train.invariant",
    "train.invariant_blocks", "model.from", "model.config", "model.save_dtype", "data.train", "data.valid",
    "data.valid_sequences", "mesh.tp", "mesh.pp", "mesh.dp", "mesh.cp", "optim.lr", "optim.clip_norm",
    "optim.weight_decay", "optim.warmup_steps", "optim.schedule", "optim.min_lr", "checkpoint.every", "checkpoint.keep",
    "checkpoint.background",
)  # fmt: skip


METRICS = "metrics.jsonl"  # the loss log in the run directory


class RunCheckpoints:
    """Saves and finds the checkpoints of the run in `config.train.run_dir`."""

    def __init__(self, config: RunConfig, decoder: DecoderConfig, data: RunData, group: Group) -> None:
        self.config, self.decoder, self.data, self.group = config, decoder, data, group
        self.root = checkpoint_root(config)
        self.slowest_seconds = 0.0  # from the beginning of a save until it was published
        self._background: BackgroundSave | None = None
        self._last: Save | None = None
        self._saved_step = 0

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after `step`."""
        every = self.config.checkpoint.every
        return bool(every) and (step % every == 0 or step == self.config.train.steps)

    def save(self, step: int, model: CausalLM, optimizer: AdamW, *, wait: bool = False) -> float:
        """Save after `step`; the seconds for which training stood still. A collective.

        With `[checkpoint] background`, only the state is copied now, unless `wait`.
        """
        started = time.perf_counter()
        self.finish()
        if self._saved_step == step:
            return time.perf_counter() - started
        background = self.config.checkpoint.background and not wait
        contents = self._contents(step, model, optimizer)
        contents = frozen(contents) if background else contents
        save = Save(self.root, step, contents, self.group, self.config.checkpoint.keep)
        if background:
            self._background = BackgroundSave(save)
        else:
            save.run()
            self._last = save
            self._took(time.perf_counter() - started)
        self._saved_step = step
        return time.perf_counter() - started

    def advance(self, *, wait: bool = False) -> None:
        """Move a save in the background on; call it at every step's boundary. A collective while one is under way."""
        if self._background is not None and self._background.advance(wait=wait):
            self._took(self._background.seconds)
            self._last, self._background = self._background.save, None

    def finish(self) -> None:
        """Wait for a save in the background, and until old ones are gone. A collective while one is under way."""
        self.advance(wait=True)
        if self._last is not None:
            self._last.wait_for_removal()

    def resume(self, wish: str, model: CausalLM, optimizer: AdamW) -> int:
        """Load the checkpoint that `wish` names ("auto": the newest whole one); its step, 0 when "auto" finds none."""
        path = self._chosen(wish)
        if path is None:
            return 0
        state = together(self.group, lambda: read_state(path))
        changes = compare_states(state, self._state(state["step"]), path)
        for line in changes:
            self._say(f"resuming with another {line}")
        together(self.group, lambda: load_arrays(path, model, _moments(optimizer)))
        optimizer.steps_done = self._saved_step = state["step"]
        self._set_aside_after(state["step"])
        self._say(f"resumed from {path} after step {state['step']}")
        return int(state["step"])

    def _chosen(self, wish: str) -> Path | None:
        if wish != "auto":
            damage = find_damage(Path(wish), self.group)
            if damage is not None:
                raise FileError(
                    f"{wish} can't be resumed from: {damage}. (To start a new run from a model's weights, name its "
                    "directory as model.from.)"
                )
            return Path(wish)
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

    def _set_aside_after(self, step: int) -> None:
        """Rename this run's checkpoints of later steps: they are damaged, or of steps that will be taken again."""

        def rename() -> list[Path]:
            later = [path for path in checkpoints(self.root) if int(path.name.removeprefix("step-")) > step]
            set_aside(later)
            return later

        for path in on_first_rank(self.group, rename):
            self._say(f"{path} is of a later step than the one resumed from; it is now aside-{path.name}")

    def _took(self, seconds: float) -> None:
        self.slowest_seconds = max(self.slowest_seconds, seconds)

    def _contents(self, step: int, model: CausalLM, optimizer: AdamW) -> Contents:
        generation = {"eos_token_id": list(self.decoder.eos_ids)} if self.decoder.eos_ids else None
        return Contents(
            model=model,
            moments=_moments(optimizer),
            dtype=self.config.model.dtype,
            config=self.decoder.hf,
            state=self._state(step),
            documents={"generation_config.json": generation},
            files=self.data.tokenizer.files,
            companions=(Path(self.config.train.run_dir) / METRICS,),
        )

    def _state(self, step: int) -> dict[str, Any]:
        run = _plain(dataclasses.asdict(self.config))
        run["train"]["global_batch_size"] = self.config.global_batch_size  # 0 follows what may change
        return {
            "format": FORMAT,
            "mpitp": __version__,
            "step": step,
            "samples_seen": step * self.config.global_batch_size,
            "seed": self.config.train.seed,
            "data_sha256": self.data.train.tokens.manifest.sha256,
            "model": _model_facts(self.decoder),
            "run": run,
        }

    def _say(self, line: str) -> None:
        if self.group.rank == 0:
            _notice(line)


def checkpoint_root(config: RunConfig) -> Path:
    """Where a run's checkpoints lie."""
    return Path(config.train.run_dir) / "checkpoints"


def compare_states(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> list[str]:
    """What differs and may, as lines for people. Raises ConfigError listing what differs and may not."""
    old, new = _flat(saved), _flat(wanted)
    ignored = ("mpitp", "run.model.fields", "samples_seen")
    allowed: list[str] = []
    refused: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) == new.get(name) or name.startswith(ignored) or _is_new_default(name, old, new):
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


def truncate_metrics(path: Path, step: int) -> None:
    """Leave out the lines of steps after `step`: they belong to steps that are lost and will be taken again."""
    temporary = path.with_suffix(".new")
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        kept = [line for line in text.split("\n") if _step_of(line) <= step]
        write_file(temporary, "".join(f"{line}\n" for line in kept))
        temporary.rename(path)
    except OSError as error:
        raise os_failure("write", path, error) from error


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut short when the run was killed
        return float("inf")


def _is_new_default(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a key of the run file is younger than the checkpoint, and says what was so before it existed."""
    section, _, key = name.removeprefix("run.").rpartition(".")
    if name in old or section not in SECTIONS:
        return False
    fields: Any = dataclasses.fields(SECTIONS[section])  # type: ignore[arg-type]
    defaults = {field.name.rstrip("_"): field.default for field in fields}
    return key in defaults and new.get(name) == _plain(defaults[key])


def _word(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not there"


def _moments(optimizer: AdamW) -> dict[str, dict[str, Any]]:
    """AdamW's state under PyTorch's names."""
    return {
        "exp_avg": {name: m for name, (m, _) in optimizer.moments.items()},
        "exp_avg_sq": {name: v for name, (_, v) in optimizer.moments.items()},
    }


def _model_facts(decoder: DecoderConfig) -> dict[str, Any]:
    return _plain({f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder) if f.name != "hf"})


def _plain(value: Any) -> Any:
    """As JSON will give it back: tuples as lists, dataclasses as dictionaries."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dictionaries as {"a.b.c": value}; the field `from_` as its key `from`."""
    if not isinstance(value, Mapping):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{name}.{key.rstrip('_')}" if name else key.rstrip("_"))
    return flat


def _notice(line: str) -> None:
    print(f"mpitp: {line}", file=sys.stderr, flush=True)
