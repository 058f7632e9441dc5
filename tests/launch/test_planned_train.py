"""`mpitp train` with `[mesh] plan = "auto"`: found at the start, kept when resumed, and to the numbers of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpitp.cli import main
from mpitp.config import run_config_from
from mpitp.errors import ConfigError
from mpitp.launch import planned_train
from mpitp.plan.auto import kept, with_layout
from mpitp.plan.layout import Layout, layout_of
from mpitp.train.run import train
from tests.command_on_threads import command_on_threads
from tests.train.run_case import losses, make_data, tables, write_run_file

MACHINE = str(Path(__file__).parents[2] / "examples" / "machines" / "ethernet_cpu.toml")
STEPS = 4


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    found = tables(
        make_data(tmp_path), tmp_path / "run", train_steps=STEPS, train_global_batch_size=6, train_eval_every=None,
        mesh_plan="auto", mesh_machine=MACHINE, checkpoint_every=2, optim_zero=1,
    )  # fmt: skip
    return write_run_file(tmp_path / "run.toml", found)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_found_told_kept_and_searched_again(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_file.parent / "run"
    assert command_on_threads(3, "train", str(run_file), "--set", "mesh.tp=3") == [0, 0, 0]
    told = said(capsys)
    assert 'mesh.tp of the run file is not used: mesh.plan = "auto"' in told
    assert told.count('mesh.plan = "auto": ') == 1 and "on 3 ranks of 10 Gbit/s Ethernet" in told
    assert "a step foretold" in told and "limited by" in told and "the next one, " in told
    layout = json.loads((directory / "layout.json").read_text())
    assert layout["pp"] * layout["dp"] * layout["cp"] * layout["tp"] == 3
    words = ("--set", "mesh.plan=given", "--set", "optim.zero=0", "--set", f"train.run_dir={run_file.parent / 'alone'}")
    assert command_on_threads(1, "train", str(run_file), *words) == [0]
    for ours, alone in zip(losses(directory), losses(run_file.parent / "alone"), strict=True):
        assert dict(ours)["loss"] == pytest.approx(dict(alone)["loss"], rel=1e-5)

    again = ("--resume", "auto", "--set")
    assert command_on_threads(3, "train", str(run_file), *again, "train.steps=5") == [0, 0, 0]
    assert "goes on in the layout of the run so far, " in said(capsys)
    assert json.loads((directory / "layout.json").read_text()) == layout
    assert command_on_threads(2, "train", str(run_file), *again, "train.steps=6") == [0, 0]
    assert "the run so far had 3 ranks, this job has 2: its layout is searched again" in said(capsys)
    (directory / "layout.json").write_text('{"tp": 2}')
    assert command_on_threads(2, "train", str(run_file), *again, "train.steps=7") == [0, 0]
    assert "doesn't tell the layout of the run so far (it has tp): it is searched again" in said(capsys)
    assert len(losses(directory)) == 7


def test_others_that_read_the_run_file_take_its_layout(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What training has found; before that, what it would find; without a machine, that it isn't known."""
    verify = ("verify", "--config", str(run_file), "--json")
    assert command_on_threads(3, *verify) == [0, 0, 0]
    found = capsys.readouterr()
    assert json.loads(found.out)["ranks"] == 3
    assert found.err.count("on 3 ranks of 10 Gbit/s Ethernet") == 1
    unknown = 'mesh.plan = "auto": training finds the layout when it starts'
    for words in (["verify", "--types", "--config", str(run_file)], ["plan", "memory", str(run_file)]):
        assert main([*words, "--ranks", "3"]) == 0
        assert "on 3 ranks of 10 Gbit/s Ethernet" in said(capsys)
        text = run_file.read_text()
        run_file.write_text("\n".join(line for line in text.splitlines() if not line.startswith("machine")))
        assert main([*words, "--ranks", "3"]) == 0
        assert said(capsys).count(unknown) == 1
        run_file.write_text(text)
    assert command_on_threads(3, "train", str(run_file)) == [0, 0, 0]
    capsys.readouterr()
    for words in (["plan", "memory"], ["plan", "graph", "--config"]):
        assert main([*words, str(run_file), "--ranks", "3"]) == 0
        assert "goes on in the layout of the run so far" in said(capsys)
    assert command_on_threads(3, *verify) == [0, 0, 0]
    assert said(capsys).count("goes on in the layout of the run so far") == 1


def test_measured_where_no_machine_is_named(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_train, "QUICK_SECONDS", 0.05)
    monkeypatch.setattr(planned_train, "QUICK_BYTES", 1 << 16)
    text = "\n".join(line for line in run_file.read_text().splitlines() if not line.startswith("machine"))
    run_file.write_text(text)
    assert command_on_threads(2, "train", str(run_file)) == [0, 0]
    assert "on 2 ranks of" in said(capsys)
    assert "[products]" in (run_file.parent / "run" / "machine.toml").read_text()
    words = ("--set", "train.overwrite=true")
    assert command_on_threads(1, "train", str(run_file), *words) == [0]
    assert "one rank has one layout" in said(capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--set", "mesh.machine=/nowhere.toml"), "can't read the machine file /nowhere.toml"),
        (("--set", "train.global_batch_size=0"), "train.global_batch_size isn't set"),
        (("--set", "model.dtype=float16"), "the machine file has no products.float16"),
    ],
)
def test_refused_on_all_ranks(
    run_file: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_on_threads(2, "train", str(run_file), *words) == [3, 3]
    assert told in said(capsys)
    assert not (run_file.parent / "run" / "layout.json").exists()


def test_a_run_without_a_layout_is_not_trained(tmp_path: Path) -> None:
    from mpitp.backend.device import CpuDevice
    from mpitp.comm import SerialGroup

    config = run_config_from(tables(tmp_path, tmp_path / "run", mesh_plan="auto"))
    with pytest.raises(ConfigError, match="this run has no layout yet"):
        train(config, SerialGroup(), CpuDevice())


def test_a_layout_in_a_run_file_of_another(tmp_path: Path) -> None:
    other: dict[str, Any] = {"mesh_pp": 2, "mesh_schedule": "zb", "mesh_stages": [1, 1], "mesh_plan": "auto"}
    config = run_config_from(tables(tmp_path, tmp_path / "run", **other))
    for layout in (
        Layout(dp=2, tp=3, zero=2, micro=1, recompute="full"),
        Layout(pp=2, schedule="interleaved", chunks=2, stages=(1, 1, 1, 0), micro=2),
        Layout(cp=2, tp=2, sequence_parallel=True, micro=4),
    ):
        assert layout_of(with_layout(config, layout), layout.ranks) == layout
    assert kept(config, 2) == (None, "")
