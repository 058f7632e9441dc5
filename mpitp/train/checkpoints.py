"""The checkpoints of one run: when they are saved, what is in them, and how a run goes on from one."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitp import __version__
from mpitp.backend.arrays import to_host
from mpitp.checkpoint.together import on_first_rank
from mpitp.checkpoint.training import (
    FORMAT,
    BackgroundSave,
    Contents,
    Save,
    find_damage,
    load_arrays,
    newest_whole,
    read_state,
    set_aside_newer,
)
from mpitp.comm.group import Group
from mpitp.config import RunConfig
from mpitp.errors import ConfigError, FileError
from mpitp.layers.param import Param
from mpitp.models.config import DecoderConfig
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


class RunCheckpoints:
    """Saves and finds the checkpoints of the run in `config.train.run_dir`."""

    def __init__(self, config: RunConfig, decoder: DecoderConfig, data: RunData, group: Group) -> None:
        self.config, self.decoder, self.data, self.group = config, decoder, data, group
        self.root = Path(config.train.run_dir) / "checkpoints"
        self._background: BackgroundSave | None = None
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
        contents = self._contents(step, model, optimizer, copy=background)
        save = Save(self.root, step, contents, self.group, self.config.checkpoint.keep)
        if background:
            self._background = BackgroundSave(save)
        else:
            save.run()
        self._saved_step = step
        return time.perf_counter() - started

    def advance(self) -> None:
        """Move a save in the background on; call it at every step's boundary. A collective while one is under way."""
        if self._background is not None and self._background.advance():
            self._background = None

    def finish(self) -> None:
        """Wait for a save in the background. A collective while one is under way."""
        if self._background is not None:
            self._background.advance(wait=True)
            self._background = None

    def resume(self, wish: str, model: CausalLM, optimizer: AdamW) -> int:
        """Load the checkpoint that `wish` names ("auto": the newest whole one); its step, 0 when "auto" finds none."""
        path = self._chosen(wish)
        if path is None:
            return 0
        state = read_state(path)
        changes = compare_states(state, self._state(state["step"]), path)
        if self.group.rank == 0:
            for line in changes:
                _notice(f"resuming with another {line}")
        load_arrays(path, model, _moments(optimizer))
        optimizer.steps_done = self._saved_step = state["step"]
        for newer in on_first_rank(self.group, lambda: set_aside_newer(path)):
            self._say(f"{newer} is newer than the checkpoint resumed from; it is now aside-{newer.name}")
        self._say(f"resumed from {path} after step {state['step']}")
        return int(state["step"])

    def _chosen(self, wish: str) -> Path | None:
        if wish == "auto":
            return newest_whole(self.root, self.group, self._say)
        damage = find_damage(Path(wish), self.group)
        if damage is not None:
            raise FileError(f"{wish} can't be resumed from: {damage}")
        return Path(wish)

    def _contents(self, step: int, model: CausalLM, optimizer: AdamW, *, copy: bool) -> Contents:
        moments = _moments(optimizer)
        named: Any = model
        if copy:
            named = Frozen(model)
            moments = {kind: {n: np.array(to_host(a)) for n, a in group.items()} for kind, group in moments.items()}
        generation = {"eos_token_id": list(self.decoder.eos_ids)} if self.decoder.eos_ids else None
        return Contents(
            model=named,
            moments=moments,
            dtype=self.config.model.dtype,
            config=self.decoder.hf,
            state=self._state(step),
            documents={"generation_config.json": generation},
            files=self.data.tokenizer.files,
        )

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "mpitp": __version__,
            "step": step,
            "samples_seen": step * self.config.global_batch_size,
            "seed": self.config.train.seed,
            "data_sha256": self.data.train.tokens.manifest.sha256,
            "model": _model_facts(self.decoder),
            "run": _plain(dataclasses.asdict(self.config)),
        }

    def _say(self, line: str) -> None:
        if self.group.rank == 0:
            _notice(line)


class Frozen:
    """A copy of a model's parameters in host memory, with the model's names and specs."""

    def __init__(self, model: CausalLM) -> None:
        self._params = [(n, Param(np.array(to_host(p.data)), p.spec)) for n, p in model.named_params()]
        self._pieces = model.hf_pieces()

    def named_params(self) -> Any:
        """The copies."""
        return iter(self._params)

    def hf_pieces(self) -> Any:
        """The model's own table."""
        return self._pieces


def compare_states(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> list[str]:
    """What differs and may, as lines for people. Raises ConfigError listing what differs and may not."""
    old, new = _flat(saved), _flat(wanted)
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    ignored = ("mpitp", "run.model.fields", "samples_seen")
    allowed: list[str] = []
    refused: list[str] = []
    for name in changed:
        if name.startswith(ignored):
            continue
        line = f"{name.removeprefix('run.')}: {old.get(name)!r}, now {new.get(name)!r}"
        (allowed if name.removeprefix("run.") in MAY_CHANGE else refused).append(line)
    if refused:
        raise ConfigError(
            f"{path} is of another run: " + "; ".join(refused) + ". These can't change within a run; "
            "start a new one from its weights with model.from and another train.run_dir"
        )
    return allowed


def truncate_metrics(path: Path, step: int) -> None:
    """Leave out the lines of steps after `step`: they belong to steps that are lost and will be taken again."""
    if not path.exists():
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    temporary.rename(path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut short when the run was killed
        return float("inf")


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
