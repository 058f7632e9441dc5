"""No run is lost: one that is replaced stays until the new one runs, and `--resume auto` says when it begins."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mpitp.checkpoint.existing import checkpoints
from mpitp.errors import FileError, MpitpError, NumericError, Preempted
from mpitp.train.loop import TrainLoop
from mpitp.train.step import TrainStep
from tests.train.run_case import config, files, losses, make_data, run
from tests.train.test_resume import After, edit_state

OLD: dict[str, Any] = {"train_steps": 4, "checkpoint_every": 2, "train_seed": 1, "train_eval_every": 0}
NEW: dict[str, Any] = {"train_steps": 3, "checkpoint_every": 1, "train_seed": 2, "train_eval_every": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A finished run with two checkpoints."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run(1, config(data, path, **OLD))
    return path


@pytest.fixture
def earlier(tmp_path: Path, finished: Path) -> Path:
    """A copy of it, to be replaced."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def whole(directory: Path) -> dict[str, bytes]:
    return files(directory, [".lock"])


def behind_a_link(run_dir: Path) -> Path:
    """Put the checkpoints elsewhere, with a link in their place; a note of the user's lies beside them."""
    scratch = run_dir.with_name("scratch")
    (run_dir / "checkpoints").rename(scratch)
    (run_dir / "checkpoints").symlink_to(scratch)
    (scratch / "note.txt").write_text("mine")
    return scratch


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_replaced_run_is_gone_when_the_new_one_runs(earlier: Path, data: Path, ranks: int, linked: bool) -> None:
    scratch = behind_a_link(earlier) if linked else earlier / "checkpoints"
    (scratch / "aside-step-00000009").mkdir()
    settings = config(data, earlier, train_overwrite=True, **NEW)
    run(ranks, settings)
    assert [dict(line)["step"] for line in losses(earlier)] == [1, 2, 3]
    assert sorted(path.name for path in scratch.iterdir() if path.name != "note.txt") == [
        f"step-{step:08}" for step in (1, 2, 3)
    ]
    assert (earlier / "checkpoints").is_symlink() == linked == (scratch / "note.txt").exists()
    states = [json.loads((path / "state.json").read_text()) for path in checkpoints(scratch)]
    assert {state["seed"] for state in states} == {2}
    run(ranks, settings, resume="auto")  # nothing left to do: it is the new run
    assert len(losses(earlier)) == 3


def failing_before(step: int) -> Any:
    real = TrainLoop.step

    def failing(self: Any, number: int) -> Any:
        if number == step:
            raise NumericError("not finite")
        return real(self, number)

    return failing


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    "cause", ["a truncated model", "no such ranks", "a first step that fails", "resumed elsewhere"]
)
def test_replaced_run_stays_until_the_new_one_runs(
    earlier: Path, data: Path, monkeypatch: pytest.MonkeyPatch, cause: str, linked: bool
) -> None:
    if linked:
        behind_a_link(earlier)
    changes: dict[str, Any] = {"train_overwrite": True, **NEW}
    resume = None
    if cause == "a truncated model":
        shutil.copytree(earlier / "model", earlier.with_name("cut"))
        os.truncate(earlier.with_name("cut") / "model.safetensors", 5000)
        fields = dict.fromkeys([f"model_{name}" for name in run_case_fields()])
        changes |= fields | {"model_from": str(earlier.with_name("cut"))}
    if cause == "no such ranks":
        changes["mesh_tp"] = 3
    if cause == "a first step that fails":
        monkeypatch.setattr(TrainStep, "__call__", lambda *_: (_ for _ in ()).throw(NumericError("nan")))
    if cause == "resumed elsewhere":
        resume = str(earlier.with_name("nothing"))
    before = whole(earlier)
    with pytest.raises(MpitpError):
        run(2, config(data, earlier, **changes), resume=resume)
    assert whole(earlier) == before
    monkeypatch.undo()
    run(2, config(data, earlier, **OLD | {"train_steps": 6}), resume="auto")
    assert len(losses(earlier)) == 6


def run_case_fields() -> list[str]:
    from tests.train.run_case import MODEL

    return list(MODEL)


def test_checkpoint_that_cannot_be_moved_leaves_all(earlier: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = whole(earlier)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "step-00000002":
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(FileError, match="can't replace the earlier run in .*Permission denied"):
        run(2, config(data, earlier, train_overwrite=True, **NEW))
    assert {name: content for name, content in whole(earlier).items() if name != ".unsaved"} == before


def test_failed_removal_is_an_error(earlier: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmtree(path: Path, **_: Any) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("mpitp.files.shutil.rmtree", rmtree)
    with pytest.raises(FileError, match="can't remove .*replaced-.*Input/output error"):
        run(2, config(data, earlier, train_overwrite=True, **NEW))
    monkeypatch.undo()
    assert checkpoints(earlier / "checkpoints") == []  # none that a run could take for its own
    run(1, config(data, earlier, **NEW), resume="auto")
    assert len(losses(earlier)) == 3
    assert not list((earlier / "checkpoints").glob(".replaced-*"))


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpitp: ")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_auto_says_that_it_begins(tmp_path: Path, data: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    run(ranks, config(data, tmp_path / "run", train_steps=1, checkpoint_every=0, optim_warmup_steps=0), resume="auto")
    assert said(capsys) == [f"mpitp: begins at step 1: {tmp_path}/run holds nothing to go on from"]
    assert len(losses(tmp_path / "run")) == 1


MOVED: dict[str, tuple[list[str], str]] = {
    "the checkpoints": (["checkpoints"], "a finished model and a log of steps"),
    "the checkpoints and the model": (["checkpoints", "model"], "a log of steps"),
    "the checkpoints and the log": (["checkpoints", "metrics.jsonl"], "a finished model"),
}


@pytest.mark.parametrize("moved", MOVED)
def test_auto_refuses_to_begin_over_a_run(
    earlier: Path, data: Path, moved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names, words = MOVED[moved]
    for name in names:
        (earlier / name).rename(earlier.with_name(name))
    before = whole(earlier)
    with pytest.raises(FileError, match=f"holds {words}, but no checkpoint to go on from; bring the checkpoints back"):
        run(2, config(data, earlier, **OLD), resume="auto")
    assert whole(earlier) == before
    capsys.readouterr()
    run(2, config(data, earlier, train_overwrite=True, **OLD), resume="auto")
    assert said(capsys) == [f"mpitp: begins at step 1, and replaces {words} in {earlier}, where no checkpoint is"]
    assert len(losses(earlier)) == 4


def test_a_finished_model_alone_is_not_trained_over(earlier: Path, data: Path) -> None:
    shutil.rmtree(earlier / "checkpoints")
    (earlier / "metrics.jsonl").unlink()
    before = whole(earlier)
    with pytest.raises(FileError, match=r"holds an earlier run; .*\(there are a finished model\)"):
        run(1, config(data, earlier, **OLD))
    assert whole(earlier) == before


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a job that is requeued unattended needs; nothing but the log of lost steps is there."""
    settings = config(data, tmp_path / "run", **OLD | {"checkpoint_every": 4})
    monkeypatch.setattr(TrainLoop, "step", failing_before(3))
    with pytest.raises(NumericError):
        run(2, settings, resume="auto")
    monkeypatch.undo()
    assert len(losses(tmp_path / "run")) == 2
    with pytest.raises(FileError, match="holds an earlier run"):
        run(2, settings)
    capsys.readouterr()
    with pytest.raises(Preempted):
        run(1, settings, resume="auto", stop=After(2))
    words = f"begins again at step 1: {tmp_path}/run holds a log of steps, of a run that ended before it had saved a"
    assert said(capsys)[0] == f"mpitp: {words} checkpoint"
    assert len(losses(tmp_path / "run")) == 2
    shutil.rmtree(tmp_path / "run/checkpoints")  # from here on it isn't one that saved nothing
    with pytest.raises(FileError, match="holds a log of steps, but no checkpoint"):
        run(2, settings, resume="auto")


def test_a_run_that_began_from_a_checkpoint_elsewhere_does_not_begin_again_without_it(
    tmp_path: Path, data: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**OLD, "train_steps": 8, "checkpoint_every": 8}
    monkeypatch.setattr(TrainLoop, "step", failing_before(2))
    with pytest.raises(NumericError):
        run(1, config(data, tmp_path / "run", **settings))
    assert (tmp_path / "run/.unsaved").exists()
    monkeypatch.undo()
    monkeypatch.setattr(TrainLoop, "step", failing_before(6))
    with pytest.raises(NumericError):
        run(1, config(data, tmp_path / "run", train_overwrite=True, **settings),
            resume=str(finished / "checkpoints/step-00000004"))  # fmt: skip
    monkeypatch.undo()
    assert [dict(line)["step"] for line in losses(tmp_path / "run")] == [5]
    with pytest.raises(FileError, match="holds a log of steps, but no checkpoint"):
        run(2, config(data, tmp_path / "run", **settings), resume="auto")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("harm", ["gone", "another", "cut"])
def test_log_that_lacks_steps_is_refused(earlier: Path, data: Path, harm: str, ranks: int) -> None:
    log = earlier / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    if harm == "gone":
        log.unlink()
    else:
        log.write_text("".join(lines[1:] if harm == "another" else lines[:3]))
    with pytest.raises(
        FileError, match=rf"metrics.jsonl has {0 if harm == 'gone' else 3} lines up to step 4, but had 4"
    ):
        run(ranks, config(data, earlier, **OLD), resume="auto")
    run(ranks, config(data, earlier.with_name("own"), **OLD | {"train_steps": 5}),
        resume=str(earlier / "checkpoints/step-00000004"))  # fmt: skip
    assert [dict(line)["step"] for line in losses(earlier.with_name("own"))] == [5]


def test_log_with_fewer_lines_than_steps_is_whole(tmp_path: Path, data: Path) -> None:
    settings = OLD | {"train_log_every": 3, "train_steps": 7}
    with pytest.raises(Preempted):
        run(1, config(data, tmp_path / "run", **settings), stop=After(5))
    run(1, config(data, tmp_path / "run", **settings | {"train_log_every": 1}), resume="auto")
    assert [dict(line)["step"] for line in losses(tmp_path / "run")] == [3, 6, 7]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wish", ["auto", "checkpoints/step-00000007"])
def test_state_of_another_step_than_the_name_says(earlier: Path, data: Path, wish: str, ranks: int) -> None:
    root = earlier / "checkpoints"
    (root / "step-00000004").rename(root / "step-00000007")
    before = whole(earlier)
    with pytest.raises(FileError, match=r"state.json is of step 4, but the directory's name is of step 7"):
        run(ranks, config(data, earlier, **OLD), resume=wish if wish == "auto" else str(earlier / wish))
    assert whole(earlier) == before


@pytest.mark.parametrize("wish", ["checkpoints", "checkpoints/", ".", "latest"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_newest_of_a_folder(
    earlier: Path, data: Path, wish: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (earlier / "latest").symlink_to(earlier / "checkpoints/step-00000004")
    capsys.readouterr()
    run(ranks, config(data, earlier, **OLD | {"train_steps": 5}), resume=f"{earlier}/{wish}")
    assert f"{'latest' if wish == 'latest' else 'step-00000004'} after step 4" in said(capsys)[-1]
    assert [dict(line)["step"] for line in losses(earlier)] == [1, 2, 3, 4, 5]


def test_folder_whose_newest_is_damaged(earlier: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = earlier / "checkpoints"
    (root / "step-00000004/manifest.json").unlink()
    capsys.readouterr()
    run(2, config(data, earlier, **OLD), resume=str(root))
    lines = said(capsys)
    assert "step-00000004 is skipped: it has no manifest.json" in lines[0] and "after step 2" in lines[-1]
    for path in checkpoints(root):
        (path / "manifest.json").unlink()
    with pytest.raises(FileError, match="can't be resumed from: none of its checkpoints is whole"):
        run(2, config(data, earlier, **OLD), resume=str(root))


def test_state_without_the_log_s_lines_is_of_an_earlier_version(tmp_path: Path, data: Path) -> None:
    run(1, config(data, tmp_path / "run", train_steps=2, checkpoint_every=2, train_eval_every=0))
    edit_state(tmp_path / "run", lambda state: state.pop("log_lines"))
    run(1, config(data, tmp_path / "run", train_steps=3, checkpoint_every=2, train_eval_every=0), resume="auto")
    assert len(losses(tmp_path / "run")) == 3


UNWRITABLE: dict[str, tuple[Any, str]] = {
    "dangling link": (lambda run: (run / "checkpoints").symlink_to(run / "gone"), "checkpoints is a link to nothing"),
    "file": (lambda run: (run / "checkpoints").write_text(""), "checkpoints is not a folder"),
    "a log that is a pipe": (lambda run: os.mkfifo(run / "metrics.jsonl"), "metrics.jsonl is no regular file"),
    "a log that is a folder": (lambda run: (run / "metrics.jsonl").mkdir(), "metrics.jsonl is no regular file"),
    "a model's place": (lambda run: (run / "model").write_text(""), "can't write to .*Not a directory"),
    "a stranger there": (lambda run: ((run / "model").mkdir(), (run / "model/a.txt").touch()), "model holds a.txt"),
}


@pytest.mark.parametrize("place", UNWRITABLE)
def test_what_cannot_be_saved_in_the_end_is_refused_at_the_beginning(tmp_path: Path, data: Path, place: str) -> None:
    (tmp_path / "run").mkdir()
    make, words = UNWRITABLE[place]
    make(tmp_path / "run")
    with pytest.raises(FileError, match=words):
        run(2, config(data, tmp_path / "run", train_overwrite=True, **OLD))


def test_a_link_to_a_log_stays_one(tmp_path: Path, data: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "log").write_text("")
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "log")
    run(1, config(data, tmp_path / "run", **OLD))
    run(1, config(data, tmp_path / "run", **OLD | {"train_steps": 5}), resume="auto")
    assert (tmp_path / "run/metrics.jsonl").is_symlink()
    assert len((tmp_path / "log").read_text().splitlines()) == 5


def test_old_checkpoints_that_stay_are_told_of(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mpitp.checkpoint import training

    def remove(path: Path) -> None:
        raise FileError(f"can't remove {path}: Permission denied")

    monkeypatch.setattr(training, "remove", remove)
    capsys.readouterr()
    run(1, config(data, tmp_path / "run", train_steps=2, checkpoint_every=1, checkpoint_keep=1))
    assert "step-00000001 should go, but can't remove" in capsys.readouterr().err
