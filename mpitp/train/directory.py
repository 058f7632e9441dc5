"""A run's directory: what stands there, whether a run may begin or goes on there, and when an earlier run gives way.

Nothing of an earlier run is touched before the first step of the new one is done: until then everything that can fail
at the start (data, weights, memory, other ranks) has failed, and the earlier run stands as it was. A run that ends
before leaves nothing of its own: no lock, no empty log, no folder.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from mpitp.checkpoint.existing import ASIDE, checkpoints
from mpitp.checkpoint.hf import MODEL_FILES
from mpitp.config import RunConfig
from mpitp.errors import FileError
from mpitp.files import (
    check_target,
    discard,
    discard_leftovers,
    folders_to_make,
    os_failure,
    remove,
    remove_empty,
)
from mpitp.train.lock import LOCK, RunLock

METRICS = "metrics.jsonl"  # the loss log
MODEL = "model"  # the final model
CHECKPOINTS = "checkpoints"
UNSAVED = ".unsaved"  # there while a run has taken steps, but saved none of them
REPLACED = ".replaced-"  # checkpoints of an earlier run on their way out


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does in its directory: goes on there, replaces what it finds, or begins. `note`: said to the user.
    `made`: folders that were made for it, the innermost first.
    """

    goes_on: bool = False
    replaces: bool = False
    note: str = ""
    made: tuple[Path, ...] = ()


class RunDirectory:
    """The directory of one run, used by rank 0 alone."""

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.train.run_dir)
        self.log, self.model = self.path / METRICS, self.path / MODEL
        self.checkpoints = self.path / CHECKPOINTS
        self._overwrite = config.train.overwrite

    def take(self, resume: str | None, watchdogs: str, stack: contextlib.ExitStack) -> Plan:
        """Make the directory, take its lock until `stack` ends, see that it can be written; refuse to mix two runs.

        `watchdogs`: the pattern of folders that earlier jobs' watchdogs may have left.
        """
        made = folders_to_make(self.path / METRICS)
        stack.callback(remove_empty, made)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            own = [path for path in (self.log, self.path / LOCK) if not os.path.lexists(path)]
            stack.enter_context(RunLock(self.path))  # before anything of another job's could be removed
            stack.callback(self._withdraw, own)
            self._discard_leftovers(watchdogs)
            plan = self._plan(resume)
            self._see_that_results_can_be_written()
            if not self.log.exists():
                self.log.touch()
        except OSError as error:
            raise os_failure("write to", self.path, error) from error
        return replace(plan, made=tuple(made))

    def _withdraw(self, own: list[Path]) -> None:
        """Remove the files that this run has made, unless it has got anywhere."""
        with contextlib.suppress(OSError):
            if self._what_stands() or (self.path / UNSAVED).exists():
                return
            for path in own:
                path.unlink(missing_ok=True)

    def give_to_new_run(self, plan: Plan, resume: str | None) -> None:
        """The first step is done: what an earlier run has left goes, and this run's results may come.

        Raises FileError when it can't be removed. Either all earlier checkpoints are out of the way then, or none.
        """
        try:
            if resume in (None, "auto"):
                (self.path / UNSAVED).touch()
            else:  # a run that began from a checkpoint elsewhere can't begin again without it
                (self.path / UNSAVED).unlink(missing_ok=True)
            moved = self._move_away(self._earlier_checkpoints()) if plan.replaces else None
            os.truncate(self.log, 0)
        except OSError as error:
            raise os_failure("replace the earlier run in", self.path, error) from error
        if moved is not None:
            remove(moved)

    def has_saved(self) -> None:
        """A checkpoint, or the final model, is there."""
        with contextlib.suppress(OSError):  # a note for `--resume auto` when it finds no checkpoint; there is one
            (self.path / UNSAVED).unlink(missing_ok=True)

    def _plan(self, resume: str | None) -> Plan:
        earlier = self._what_stands()
        if self._continues(resume):
            return Plan(goes_on=True)
        is_auto = resume == "auto"
        if not earlier:
            return Plan(note=f"begins at step 1: {self.path} holds nothing to go on from" if is_auto else "")
        if is_auto and (self.path / UNSAVED).exists():
            return Plan(note=f"begins again at step 1: {self.path} holds {earlier}, of a run that ended before it "
                        "had saved a checkpoint")  # fmt: skip
        if not self._overwrite:
            raise FileError(self._refusal(earlier, is_auto))
        return Plan(
            replaces=True, note=f"begins at step 1, and replaces {earlier} in {self.path}, where no checkpoint is"
        ) if is_auto else Plan(replaces=True)  # fmt: skip

    def _refusal(self, earlier: str, is_auto: bool) -> str:
        if is_auto:
            return (
                f"{self.path} holds {earlier}, but no checkpoint to go on from; bring the checkpoints back to "
                f"{self.checkpoints}, choose another train.run_dir, or begin again over what is there with "
                "--set train.overwrite=true"
            )
        return (
            f"{self.path} holds an earlier run; go on with it by --resume auto, choose another train.run_dir, or "
            f"replace it with --set train.overwrite=true (there are {earlier})"
        )

    def _what_stands(self) -> str:
        """What an earlier run has left, in words; "" for one that failed before its first step, or for none."""
        found = []
        if self.model.is_dir() and any(self.model.iterdir()):
            found.append("a finished model")
        if self.log.exists() and self.log.stat().st_size:
            found.append("a log of steps")
        if self._earlier_checkpoints():
            found.append("checkpoints" if checkpoints(self.checkpoints) else "checkpoints set aside")
        return " and ".join(found)

    def _continues(self, resume: str | None) -> bool:
        """Whether this run goes on with a checkpoint of this directory; one from elsewhere begins another run."""
        if resume is None:
            return False
        if resume == "auto":
            return bool(checkpoints(self.checkpoints))
        root, named = self.checkpoints.resolve(), Path(os.path.abspath(resume))
        folders = (named, named / CHECKPOINTS, named.parent, named.resolve().parent)
        return root in [folder.resolve() for folder in folders]

    def _earlier_checkpoints(self) -> list[Path]:
        return [*checkpoints(self.checkpoints), *sorted(self.checkpoints.glob(f"{ASIDE}step-*"))]

    def _move_away(self, paths: list[Path]) -> Path | None:
        """All of them into one folder beside them, from where no run takes them; back again when one can't be moved."""
        if not paths:
            return None
        folder = self.checkpoints / f"{REPLACED}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        moved: list[Path] = []
        try:
            for path in paths:
                path.rename(folder / path.name)
                moved.append(path)
        except OSError:
            for path in moved:
                (folder / path.name).rename(path)
            folder.rmdir()
            raise
        return folder

    def _see_that_results_can_be_written(self) -> None:
        """What would otherwise fail when hours of work are to be saved."""
        check_target(self.model, True, MODEL_FILES)
        if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
            what = "a link to nothing" if self.checkpoints.is_symlink() else "not a folder"
            raise FileError(f"{self.checkpoints} is {what}, but checkpoints are saved there; make it one, or remove it")
        if self.log.exists() and not self.log.is_file():
            raise FileError(f"{self.log} is no regular file, but the loss log is written there; remove it")
        for folder in (self.path, self.checkpoints):
            if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
                raise os_failure("write to", folder, PermissionError(13, os.strerror(13)))

    def _discard_leftovers(self, watchdogs: str) -> None:
        """Remove what jobs that were killed have left."""
        discard_leftovers(self.model)
        for leftover in (*self.path.glob(watchdogs), *self.checkpoints.glob(f"{REPLACED}*")):
            discard(leftover)
