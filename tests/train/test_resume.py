"""A run that is cut and goes on is the run that was never cut: to the last digit in one layout, in any if invariant."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mpitp.checkpoint.existing import checkpoints
from mpitp.comm import SerialGroup
from mpitp.data.sampler import Sampler, windows_of
from mpitp.errors import ConfigError, FileError, NumericError, Preempted
from mpitp.train.loop import TrainLoop
from mpitp.train.run import train
from mpitp.train.setup import open_data
from mpitp.train.stop import StopSignals
from tests.train.run_case import config, files, losses, make_data, run, tables, write_run_file

STEPS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def cut(run_dir: Path, step: int) -> None:
    """What a run leaves that was killed some steps after the checkpoint of `step`, in the midst of a line."""
    for path in checkpoints(run_dir / "checkpoints"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    shutil.rmtree(run_dir / "model")
    log = run_dir / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: step + 2]) + lines[step + 2][:17])


def result_of(run_dir: Path) -> Any:
    """All that must not depend on whether a run was cut: losses, the final model, the last checkpoint's tensors."""
    tensors = files(run_dir / "checkpoints" / f"step-{STEPS:08}", ["manifest.json", "state.json"])
    return losses(run_dir), files(run_dir / "model"), tensors


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in the background": {"checkpoint_background": True},
    "one microbatch": {"train_micro_batch_size": 4},
    "float64": {"model_dtype": "float64"},
    "without dropout": {
        "model_dropout": None,
        "model_embd_pdrop": 0.0,
        "model_attn_pdrop": 0.0,
        "model_resid_pdrop": 0.0,
    },
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_are_five_and_five(tmp_path: Path, data: Path, variant: str, ranks: int) -> None:
    settings = config(data, tmp_path / "run", **VARIANTS[variant])
    run(ranks, settings)
    unbroken = result_of(tmp_path / "run")
    cut(tmp_path / "run", 5)
    run(ranks, settings, resume="auto")
    assert result_of(tmp_path / "run") == unbroken
    assert [dict(line)["step"] for line in unbroken[0]] == list(range(1, STEPS + 1))
    assert [dict(line)["step"] for line in unbroken[0] if "valid_loss" in dict(line)] == [4, 8, 10]


def test_in_invariant_mode_on_another_rank_count_each_time(tmp_path: Path, data: Path) -> None:
    settings = config(data, tmp_path / "run", train_invariant=True, checkpoint_every=2, checkpoint_keep=9)
    run(2, settings)
    unbroken = result_of(tmp_path / "run")
    for step, ranks in ((6, 2), (4, 3), (2, 1)):  # each resumes what another rank count has written
        cut(tmp_path / "run", step)
        run(ranks, settings, resume="auto")
        assert result_of(tmp_path / "run") == unbroken


def test_on_another_rank_count_the_losses_are_close(tmp_path: Path, data: Path) -> None:
    settings = config(data, tmp_path / "run")
    run(1, settings)
    unbroken = [dict(line)["loss"] for line in losses(tmp_path / "run")]
    cut(tmp_path / "run", 5)
    run(3, settings, resume="auto")
    assert [dict(line)["loss"] for line in losses(tmp_path / "run")] == pytest.approx(unbroken, rel=1e-5)


def test_every_sample_is_seen_exactly_once(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(data, tmp_path / "run", data_valid=None, train_eval_every=0)
    seen: list[int] = []
    real = Sampler.batch

    def batch(self: Sampler, samples: Any) -> Any:
        seen.extend(samples)
        return real(self, samples)

    monkeypatch.setattr(Sampler, "batch", batch)
    with pytest.raises(Preempted):
        run(1, settings, stop=After(3))
    with pytest.raises(Preempted):
        run(1, settings, resume="auto", stop=After(4))
    run(1, settings, resume="auto")
    assert seen == list(range(40))
    epoch = open_data(settings).train.num_windows
    assert sorted(windows_of(range(epoch), epoch, settings.train.seed)) == list(range(epoch))


class After(StopSignals):
    """A signal that comes in the n-th step."""

    def __init__(self, steps: int) -> None:
        super().__init__(())
        self._looks = itertools.count(1)
        self._steps = steps

    @property  # type: ignore[override]
    def received(self) -> str | None:
        return "SIGUSR1" if next(self._looks) >= self._steps else None

    @received.setter
    def received(self, value: str | None) -> None:
        pass


@pytest.mark.parametrize("background", [False, True])
def test_preempted_run_is_saved_and_goes_on(tmp_path: Path, data: Path, background: bool) -> None:
    settings = config(data, tmp_path / "whole")
    run(2, settings)
    settings = config(data, tmp_path / "run", checkpoint_background=background)
    for step, stop in ((2, After(4)), (7, After(9)), (10, None)):
        options: dict[str, Any] = {} if stop is None else {"stop": stop}
        if step < 10:
            with pytest.raises(Preempted, match=rf"stopped after step {step} \(SIGUSR1 received\); the state is saved"):
                run(2, settings, resume="auto", **options)
            assert checkpoints(tmp_path / "run" / "checkpoints")[0].name == f"step-{step:08}"
        else:
            run(2, settings, resume="auto")
    assert result_of(tmp_path / "run") == result_of(tmp_path / "whole")


def test_time_that_is_up_stops_a_run(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Preempted, match=r"after step 1 \(train.stop_after has passed\)"):
        run(2, config(data, tmp_path / "a", train_stop_after="0.001s"))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 50))  # less than what is kept back for a save
    with pytest.raises(Preempted, match=r"after step 1 \(the job ends in \d+ s\)"):
        run(2, config(data, tmp_path / "b"))
    assert [path.name for path in checkpoints(tmp_path / "b" / "checkpoints")] == ["step-00000001"]


@pytest.mark.parametrize("background", [False, True])
def test_stop_at_a_step_that_saves_anyway_saves_once(
    tmp_path: Path, data: Path, background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train_stop_after": "0.001s", "checkpoint_every": 1, "checkpoint_background": background}
    with pytest.raises(Preempted, match="after step 1"):
        run(2, config(data, tmp_path / "run", **settings))
    assert capsys.readouterr().err.count("step 1: checkpoint") == 1
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000001"]


def test_stop_in_the_last_step_is_the_end(tmp_path: Path, data: Path) -> None:
    assert run(1, config(data, tmp_path / "run", train_steps=3), stop=After(3)).last_loss is not None


def test_resumed_with_nothing_left(tmp_path: Path, data: Path) -> None:
    settings = config(data, tmp_path / "run")
    run(1, settings)
    before = result_of(tmp_path / "run")
    result = run(2, settings, resume="auto")
    assert (result.first_loss, result.last_loss) == (None, None)
    assert result_of(tmp_path / "run") == before


def test_damaged_newest_is_skipped_and_set_aside(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(data, tmp_path / "run")
    run(2, settings)
    unbroken = result_of(tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    (root / "step-00000010" / "model.safetensors").write_bytes(b"")
    capsys.readouterr()
    run(2, settings, resume="auto")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpitp: ")]
    assert said == [
        f"mpitp: {root}/step-00000010 is skipped: model.safetensors has 0 bytes, its manifest.json says "
        f"{len(unbroken[2]['model.safetensors'])}",
        f"mpitp: {root}/step-00000010 is of a later step than the one resumed from; it is now aside-step-00000010",
        f"mpitp: resumed from {root}/step-00000005 after step 5",
    ]
    assert result_of(tmp_path / "run") == unbroken
    assert {path.name for path in root.iterdir()} == {"step-00000005", "step-00000010", "aside-step-00000010"}


def test_when_none_is_whole_nothing_is_thrown_away(tmp_path: Path, data: Path) -> None:
    settings = config(data, tmp_path / "run")
    run(1, settings)
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        (path / "manifest.json").unlink()
    before = files(tmp_path / "run", [".lock"])
    with pytest.raises(FileError, match="none of the 2 checkpoints in .* is whole"):
        run(2, settings, resume="auto")
    assert files(tmp_path / "run", [".lock"]) == before
    run(1, config(data, tmp_path / "run", train_overwrite=True), resume="auto")
    assert len(losses(tmp_path / "run")) == STEPS
    assert len(list((tmp_path / "run" / "checkpoints").glob("aside-*"))) == 2


def test_named_checkpoint(tmp_path: Path, data: Path) -> None:
    settings = config(data, tmp_path / "run")
    run(2, settings)
    unbroken = result_of(tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    run(2, settings, resume=str(root / "step-00000005"))
    assert result_of(tmp_path / "run") == unbroken
    other = config(data, tmp_path / "other")
    run(2, other, resume=str(root / "step-00000005"))  # begins another run directory, and leaves the first alone
    assert losses(tmp_path / "other") == unbroken[0][5:]
    assert result_of(tmp_path / "run") == unbroken
    with pytest.raises(FileError, match="holds an earlier run"):
        run(2, other, resume=str(root / "step-00000005"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "it doesn't exist"),
        (lambda path: path.mkdir(), "it has no manifest.json"),
        (lambda path: path.write_text("a file"), "it has no manifest.json"),
    ],
)
def test_named_checkpoint_that_is_none(tmp_path: Path, data: Path, make: Any, words: str) -> None:
    make(tmp_path / "named")
    with pytest.raises(FileError, match=f"named can't be resumed from: {words}.*model.from"):
        run(2, config(data, tmp_path / "run"), resume=str(tmp_path / "named"))


def test_earlier_run_is_not_mixed_in(tmp_path: Path, data: Path) -> None:
    settings = config(data, tmp_path / "run", train_steps=2, checkpoint_every=2)
    run(1, settings)
    before = files(tmp_path / "run", [".lock"])
    with pytest.raises(FileError, match="holds an earlier run; go on with it by --resume auto"):
        run(2, settings)
    assert files(tmp_path / "run", [".lock"]) == before
    run(2, config(data, tmp_path / "run", train_steps=1, train_overwrite=True))
    assert len(losses(tmp_path / "run")) == 1
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000001"]


def test_run_that_never_began_is_no_earlier_run(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="needs 4 ranks, the job has 2"):
        run(2, config(data, tmp_path / "run", mesh_tp=4))
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileError, match="named can't be resumed from"):
        run(2, config(data, tmp_path / "run"), resume=str(tmp_path / "named"))
    run(2, config(data, tmp_path / "run"))
    assert len(losses(tmp_path / "run")) == STEPS


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": (
        {"model_n_inner": 41, "model_n_layer": 1},
        "model.n_inner: 37, now 41.*model.n_layer: 2, now 1",
    ),
    "another seed": ({"train_seed": 2}, r"train.seed: 1, now 2"),
    "batch": ({"train_global_batch_size": 8}, "train.global_batch_size: 4, now 8"),
    "batch by another key": (
        {"train_global_batch_size": 0, "train_micro_batch_size": 1},
        "train.global_batch_size: 4, now 1",
    ),
    "sequence": ({"data_seq_len": 9}, "data.seq_len: 8, now 9"),
    "dtype": ({"model_dtype": "float64"}, "model.dtype: 'float32', now 'float64'"),
    "betas": ({"optim_betas": [0.9, 0.99]}, r"optim.betas: \[0.9, 0.95\], now \[0.9, 0.99\]"),
    "dropout": ({"model_resid_pdrop": 0.5}, "model.resid_pdrop: 0.15, now 0.5"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run of two steps with a checkpoint."""
    path = tmp_path_factory.mktemp("whole") / "run"
    run(1, config(data, path, train_steps=2, checkpoint_every=2))
    return path


@pytest.mark.parametrize("change", REFUSED)
def test_what_may_not_change_is_listed(tmp_path: Path, data: Path, whole: Path, change: str) -> None:
    shutil.copytree(whole, tmp_path / "run")
    before = files(tmp_path / "run", [".lock"])
    changes, words = REFUSED[change]
    with pytest.raises(ConfigError, match=f"is of another run: .*{words}.*can't change within a run"):
        run(2, config(data, tmp_path / "run", **changes), resume="auto")
    assert files(tmp_path / "run", [".lock"]) == before


def test_other_data_is_refused(tmp_path: Path, data: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(data / "valid", tmp_path / "data" / "train")
    shutil.copytree(data / "valid", tmp_path / "data" / "valid")
    with pytest.raises(ConfigError, match="data_sha256"):
        run(1, config(tmp_path / "data", tmp_path / "run"), resume="auto")


def test_what_may_change_is_logged(tmp_path: Path, data: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(data, tmp_path / "moved")
    changes: dict[str, Any] = {"train_steps": 3, "optim_lr": 2e-2, "train_micro_batch_size": 4, "checkpoint_keep": 1}
    capsys.readouterr()
    run(2, config(tmp_path / "moved", tmp_path / "run", checkpoint_every=2, **changes), resume="auto")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpitp: resuming with another")]
    told = [line.removeprefix("mpitp: resuming with another ").partition(":")[0] for line in said]
    moved = ["data.train", "data.valid", "optim.lr", "train.micro_batch_size", "train.run_dir", "train.steps"]
    assert told == ["checkpoint.keep", *moved]
    assert "mpitp: resuming with another train.steps: 2, now 3" in said


def edit_state(run_dir: Path, change: Any) -> None:
    """Change state.json as another version would have written it, manifest and all."""
    import zlib

    (path,) = checkpoints(run_dir / "checkpoints")
    state = json.loads((path / "state.json").read_text())
    change(state)
    text = json.dumps(state).encode()
    (path / "state.json").write_bytes(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(text), "crc32": [zlib.crc32(text)]}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_keys_that_came_later_have_their_defaults(tmp_path: Path, data: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    edit_state(tmp_path / "run", lambda state: (state["run"]["optim"].pop("eps"), state["run"]["model"].pop("dtype")))
    settings = {"train_steps": 3, "checkpoint_every": 2}
    with pytest.raises(ConfigError, match="optim.eps: not there, now 1e-06"):
        run(1, config(data, tmp_path / "run", optim_eps=1e-6, **settings), resume="auto")
    run(1, config(data, tmp_path / "run", **settings), resume="auto")


def test_newer_format_is_refused(tmp_path: Path, data: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    edit_state(tmp_path / "run", lambda state: state.update(format=2))
    with pytest.raises(FileError, match="format 2 is not the one that this version reads"):
        run(2, config(data, tmp_path / "run"), resume="auto")


def test_missing_optimizer_part_is_refused_and_named(tmp_path: Path, data: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (path,) = checkpoints(tmp_path / "run" / "checkpoints")
    (path / "optimizer/exp_avg.safetensors").unlink()
    with pytest.raises(
        FileError, match=r"step-00000002 can't be resumed from: optimizer/exp_avg.safetensors is missing"
    ):
        run(2, config(data, tmp_path / "run"), resume=str(path))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["optimizer/exp_avg.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FileError, match="optimizer holds neither exp_avg.safetensors"):
        run(2, config(data, tmp_path / "run"), resume="auto")


def test_exit_codes_of_the_verb(tmp_path: Path, data: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mpitp.cli import main

    shutil.copytree(whole, tmp_path / "run")
    path = write_run_file(tmp_path / "run.toml", tables(data, tmp_path / "run", train_steps=4, checkpoint_every=2))
    assert main(["train", str(path)]) == 4
    assert main(["train", str(path), "--resume", str(tmp_path)]) == 4
    assert main(["train", str(path), "--resume", "auto", "--set", "train.seed=3"]) == 3
    assert main(["train", str(path), "--resume", "auto", "--set", "train.signals=['KILL']"]) == 3
    assert main(["train", str(path), "--resume", "auto", "--set", "train.stop_after=0.001s"]) == 75
    assert main(["train", str(path), "--resume", "auto"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert main(["train", str(path), "--resume", "auto"]) == 0
    assert capsys.readouterr().out.startswith("nothing left to do, held-out loss")


def test_a_failing_step_leaves_what_was_saved(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(data, tmp_path / "run", checkpoint_background=True)
    run(2, config(data, tmp_path / "whole"))
    real = TrainLoop.step

    def step(self: Any, number: int) -> Any:
        if number == 7:
            raise NumericError("not finite")
        return real(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(TrainLoop, "step", step)
        with pytest.raises(NumericError):
            run(2, settings)
    run(2, settings, resume="auto")
    assert result_of(tmp_path / "run") == result_of(tmp_path / "whole")


def test_leftovers_of_killed_runs_go(tmp_path: Path, data: Path) -> None:
    run(1, config(data, tmp_path / "run", train_steps=1))
    for name in (".model.ab.partial", ".model.ab.old", ".watchdog-n1-1-1", "checkpoints/.step-00000001.x.partial",
                 "checkpoints/.replaced-ab"):  # fmt: skip
        (tmp_path / "run" / name).mkdir()
    run(2, config(data, tmp_path / "run", train_steps=2), resume="auto")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".lock",
        "checkpoints",
        "metrics.jsonl",
        "model",
    ]
    assert all(path.name.startswith("step-") for path in (tmp_path / "run/checkpoints").iterdir())


def test_group_of_one_needs_no_watching(tmp_path: Path, data: Path) -> None:
    from mpitp.backend.device import CpuDevice

    train(config(data, tmp_path / "run", train_steps=1), SerialGroup(), CpuDevice(), debug_collectives=True)
