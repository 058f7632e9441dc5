"""Ranks of unequal weight: whatever each of them gets, a run equals that of one rank."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from mpitp.backend.device import CpuDevice
from mpitp.comm import SerialGroup, abstract_mesh, make_mesh, run_threads
from mpitp.comm.mesh import AXES
from mpitp.errors import ConfigError
from mpitp.layers import speeds
from mpitp.models import config_from_hf
from mpitp.train import shares
from mpitp.train.deal import Deal
from mpitp.train.setup import mesh_sizes, run_mesh
from mpitp.train.shares import with_shares
from mpitp.train.stages import check_pipeline
from tests.command_on_threads import command_on_threads
from tests.models.model_cases import RAW
from tests.train.layouts import check_layout, check_resumed
from tests.train.run_case import config, make_data, tables, write_run_file

Keys = dict[str, Any]

SP = {"sequence_parallel": True}
LLAMA, TIED_LLAMA = "llama 9/3", "llama biases, tied, 5/1, llama3"
SHORT = {"train_steps": 2, "checkpoint_every": 2}
DEEP = {"model_n_layer": 4, "train_global_batch_size": 8}

# [mesh], other keys of the layout, what both runs have (no model: GPT-2, tied)
LAYOUTS: list[tuple[Keys, Keys, Keys]] = [
    ({"tp": 2, "shares": [2, 1]}, {}, {"model": LLAMA}),
    ({"tp": 3, "shares": [1, 0, 2.5], **SP}, {}, {"model": TIED_LLAMA}),  # the second rank has no head and no column
    ({"dp": 2, "shares": {"dp": [1, 3]}}, {}, {}),
    ({"dp": 3, "shares": {"dp": [0, 1, 2]}}, {"optim_zero": 3}, {"model": LLAMA}),
    ({"dp": 2, "tp": 2, "shares": {"dp": [3, 1], "tp": [1, 2]}, **SP}, {"optim_zero": 2}, {"model": LLAMA}),
    ({"pp": 2, "shares": {"pp": [1, 3]}, "schedule": "zb"}, {"train_recompute": "every:2"}, DEEP),
    ({"pp": 2, "shares": {"pp": [3, 1]}, "schedule": "interleaved"}, {}, {**DEEP, "model_n_layer": 6}),
    ({"pp": 2, "dp": 2, "tp": 2, "shares": {"pp": [2, 1], "dp": [1, 2], "tp": [3, 1]}}, {"optim_zero": 1}, DEEP),
    ({"cp": 2, "tp": 2, "shares": {"tp": [1, 2]}, "cp_form": "heads", **SP}, {}, {"model": LLAMA, "data_seq_len": 7}),
    ({"ep": 2, "tp": 2, "shares": {"ep": [1, 2], "tp": [2, 1]}}, {}, {"model": "mixtral"}),
]


def name_of(layout: tuple[Keys, Keys, Keys]) -> str:
    mesh, others, _ = layout
    return " ".join(f"{key}={value}" for key, value in (mesh | others).items()).replace("'", "")


@pytest.mark.parametrize(("mesh", "layout", "same"), LAYOUTS, ids=map(name_of, LAYOUTS))
def test_equals_one_rank(mesh: Keys, layout: Keys, same: Keys) -> None:
    ranks = prod(size for axis, size in mesh.items() if axis in AXES)
    check_layout(ranks, mesh, layout, **{**SHORT, **same})


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "mesh",
    [{"dp": 2, "shares": {"dp": [2, 1]}}, {"dp": 3, "tp": 2, "shares": {"dp": [1, 0, 2], "tp": [1, 2]}}],
    ids=str,
)
def test_invariant_to_the_bit(mesh: Keys, zero: int) -> None:
    """Dropout and a tied head included; microbatches go to the ranks in turn, in rounds that not all take part in."""
    ranks = mesh["dp"] * mesh.get("tp", 1)
    same = {"train_invariant": True, "model_dtype": "float32", **SHORT}
    check_layout(ranks, mesh, {"optim_zero": zero}, tolerance=0.0, **same)


def test_a_run_goes_on_with_other_shares() -> None:
    check_resumed(
        (2, {"tp": 2, "shares": [2, 1]}, {}),
        (2, {"tp": 2, "shares": [1, 5]}, {}),
        (4, {"dp": 2, "tp": 2, "shares": {"dp": [1, 2]}}, {"optim_zero": 1}),
        (2, {"tp": 2}, {}),
    )


@pytest.mark.parametrize(
    ("count", "weights", "expected"),
    [
        (6, (2.0, 1.0), [[0, 2, 4, 5], [1, 3]]),
        (5, (0.0, 1.0, 2.0), [[], [0, 2], [1, 3, 4]]),
        (5, (), [[0, 2, 4], [1, 3]]),
    ],
)
def test_rounds_of_microbatches(count: int, weights: tuple[float, ...], expected: list[list[int]]) -> None:
    ranks = len(expected)
    deals = [Deal(rank, ranks, in_turn=True, weights=weights) for rank in range(ranks)]
    assert [list(deal.of(count)) for deal in deals] == expected
    assert deals[0].counts(count) == tuple(map(len, expected))


def test_measured_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first rank decides and says what, whatever another one thinks that it has seen."""
    seen = lambda group, device, dtype, width: [0.5, 1.0, 0.5 + group.rank, 1.0]  # noqa: E731
    monkeypatch.setattr(shares, "measure_speeds", seen)
    settings = config(tmp_path, tmp_path, mesh_shares="measured", mesh_dp=2, mesh_tp=2)
    found = run_threads(4, lambda group: with_shares(settings, 16, group, CpuDevice()).mesh.shares)
    assert found == [{"tp": (0.5, 1.0)}] * 4
    told = "mesh.shares measured: speeds of the ranks 0.50, 1.00, 0.50, 1.00; dealt by { tp = [0.5, 1.0] }"
    assert capsys.readouterr().err.count(told) == 1


def test_ranks_that_are_equally_fast_get_equal_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_rounds_a_second", lambda one_round: 5.0)
    settings = config(tmp_path, tmp_path, mesh_shares="measured")
    assert run_threads(2, lambda group: with_shares(settings, 16, group, CpuDevice()).mesh.shares) == ["equal"] * 2


def test_stages_of_the_run_files_own_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "measure_speeds", lambda group, device, dtype, width: [1.0, 0.5])
    for stages, expected in (((), {"pp": (1.0, 0.5)}), ((1, 1), "equal")):
        settings = config(tmp_path, tmp_path, mesh_shares="measured", mesh_pp=2, mesh_stages=list(stages))
        found = run_threads(2, lambda group, run=settings: with_shares(run, 16, group, CpuDevice()).mesh.shares)
        assert found == [expected] * 2


def test_a_pipeline_keeps_the_microbatches_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica a tenth as fast would have none, where two stages need two: it has as many as the other."""
    monkeypatch.setattr(shares, "measure_speeds", lambda group, device, dtype, width: [1.0, 0.1, 0.5, 0.05])
    keys = {"mesh_shares": "measured", "mesh_pp": 2, "mesh_dp": 2, "train_micro_batch_size": 1}
    for sequences, expected in ((40, {"pp": (1.0, 0.5), "dp": (1.0, 0.1)}), (4, {"pp": (1.0, 0.5)})):
        settings = config(tmp_path, tmp_path, **keys, train_global_batch_size=sequences)
        found = run_threads(4, lambda group, run=settings: with_shares(run, 16, group, CpuDevice()).mesh.shares)
        assert found == [expected] * 4


def test_speeds_are_those_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "WINDOWS", 2)
    monkeypatch.setattr(speeds, "WINDOW_SECONDS", 0.01)
    for found in run_threads(2, lambda group: speeds.measure_speeds(group, CpuDevice(), "float32", 16)):
        assert len(found) == 2 and max(found) == 1 and min(found) > 0


BAD: list[tuple[Any, str]] = [
    ([2, -1], "mesh.shares = .2, -1.: expected .* of at least 0, and one above 0"),
    ([0, 0], "mesh.shares = .0, 0.: expected .* of at least 0, and one above 0"),
    ([1, float("nan")], "mesh.shares = .1, nan.: expected .*a list of one weight for each rank along tp"),
    ([], "mesh.shares = ..: expected"),
    ("fast", 'mesh.shares = "fast": expected "equal", "measured", a list'),
    ({"cp": [1, 2]}, "mesh.shares = .* such lists for pp, dp, ep, tp in a table"),
    ({"tp": 2}, "mesh.shares = .*: expected"),
    (
        [2, 1, 1],
        "mesh.shares along tp = .2.0, 1.0, 1.0. has 3 weights, but mesh.tp has 2 ranks; name one weight a rank",
    ),
    ({"dp": [2, 1]}, "mesh.shares along dp = .* has 2 weights, but mesh.dp has 1 rank"),
    ({"pp": [0, 1]}, "mesh.shares along pp = .0.0, 1.0. has 2 weights, but mesh.pp has 1 rank"),
]


@pytest.mark.parametrize(("shares", "words"), BAD, ids=lambda value: str(value)[:20])
def test_bad_shares(shares: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run_threads(2, lambda group: run_mesh(config(tmp_path, tmp_path, mesh_shares=shares), group))


def test_weights_of_axes_that_are_yet_to_be_found(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="for a number of ranks, which mesh.plan = 'auto' chooses; set mesh.shares = "
    ):
        config(tmp_path, tmp_path, mesh_shares=[2, 1], mesh_plan="auto")


def test_a_stage_without_blocks(tmp_path: Path) -> None:
    settings = config(tmp_path, tmp_path, mesh_shares={"pp": [0, 1]}, mesh_pp=2)
    with pytest.raises(ConfigError, match="a stage has at least one block; expected weights above 0"):
        run_threads(2, lambda group: run_mesh(settings, group))


def test_weights_of_a_mesh_of_ones_own() -> None:
    with pytest.raises(ConfigError, match="nothing is dealt by weight along 'cp'"):
        make_mesh(SerialGroup(), weights={"cp": [1]})
    with pytest.raises(ConfigError, match="expected finite weights"):
        make_mesh(SerialGroup(), weights={"tp": [float("nan")]})


PIPELINES: list[tuple[dict[str, Any], str]] = [
    ({"train_global_batch_size": 6}, r"deals 6 microbatches as \[5, 1\] .*, but mesh.pp = 2 stages need at least 2"),
    (
        {"train_global_batch_size": 12, "optim_zero": 3},
        r"as \[10, 2\] to the replicas, but optim.zero = 3 beside mesh.pp needs as many on each",
    ),
    (
        {"train_global_batch_size": 11, "mesh_schedule": "interleaved"},
        "takes them in rounds of 2; use another schedule",
    ),
]


@pytest.mark.parametrize(("changes", "words"), PIPELINES, ids=str)
def test_microbatches_for_stages(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    mesh = {"mesh_pp": 2, "mesh_dp": 2, "mesh_shares": {"dp": [5, 1]}, "train_micro_batch_size": 1}
    settings = config(tmp_path, tmp_path, **{**mesh, **changes})
    decoder = config_from_hf({**RAW["gpt2"], "n_layer": 4})
    laid = abstract_mesh(mesh_sizes(settings), 0, 4, settings.mesh.weights)
    with pytest.raises(ConfigError, match=words):
        check_pipeline(settings, decoder, laid)


def test_every_rank_ends_with_the_code_of_a_wrong_run_file(tmp_path: Path) -> None:
    make_data(tmp_path)
    path = write_run_file(tmp_path / "run.toml", tables(tmp_path / "data", tmp_path / "run", mesh_shares=[1, 2, 3]))
    assert command_on_threads(2, "train", str(path)) == [3, 3]
    assert command_on_threads(2, "train", str(path), "--set", "mesh.shares=[2, 1]", "--set", "train.steps=1") == [0, 0]
    words = ["--set", "mesh.shares.tp=[1, 2]", "--set", "train.steps=2", "--resume", "auto"]
    assert command_on_threads(2, "train", str(path), "--set", "mesh.shares={}", *words) == [0, 0]
