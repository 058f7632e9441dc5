"""`mpitp verify` of models with an encoder and a decoder: every layout equals one rank, and faults are placed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.comm.group import Pending
from mpitp.errors import PlacementError
from mpitp.layers.mappings import CopyToTP
from mpitp.layers.passes import Crossing
from mpitp.layers.summation import local_sum
from mpitp.models.beside import Memory
from mpitp.pipeline import runner
from mpitp.verify.batches import with_edges
from mpitp.verify.source import SourceArguments, source_of
from tests.command_on_threads import command_on_threads
from tests.parity.encoder_decoder_case import PAIR_CASES, PAIRS
from tests.train.run_case import write_run_file
from tests.train.test_pair_task import MODELS, reversed_words
from tests.verify.test_encoders import report_of

CASES = [(case, 3) for case in PAIR_CASES] + [("bart", 7)]


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_every_rank_count_equals_one_rank(case: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(PAIRS / case), "--dtype", "float64", "--steps", "1", "--finite-differences", "3"]
    assert command_on_threads(ranks, "verify", *words, "--json") == [0] * ranks, capsys.readouterr().err
    rows = {(row["name"], row["kind"]) for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {("to decoder", "dx"), ("blocks.0.cross.kv", "y"), ("encoder.blocks.0", "dx"), ("head", "dx")} <= rows


def test_invariant_mode_is_equal_to_the_bit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(PAIRS / "t5-gated"), "--invariant", "--steps", "1", "--json"]
    assert command_on_threads(2, "verify", *words) == [0] * 2, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) > 100 and all(row["ok"] and row["largest_abs"] == 0 for row in rows)


def run_file(folder: Path, model: str) -> str:
    """Four microbatches of three pairs each."""
    (folder / "train.tsv").write_text(reversed_words(12, 1))
    data = {"train": str(folder / "train.tsv"), "tokenizer": "bytes", "seq_len": 8}
    train = {"steps": 1, "global_batch_size": 12, "micro_batch_size": 3, "run_dir": str(folder / "run")}
    tables = {"model": MODELS[model], "task": {"kind": "translation"}, "data": data, "train": train}
    return str(write_run_file(folder / "run.toml", tables))


LAYOUTS = [
    ("bart", 4, ("mesh.dp=2", "optim.zero=2")),
    ("t5", 3, ("mesh.dp=3", "optim.zero=3", 'train.recompute="full"')),
    ("t5", 2, ('train.recompute="attention"',)),
    ("t5", 3, ("mesh.pp=3", 'mesh.schedule="zb"')),
    ("bart", 4, ("mesh.pp=2", "mesh.sequence_parallel=true")),
    ("t5", 4, ("mesh.pp=2", "mesh.shares={pp=[2,1], tp=[1,3]}")),
    ("bart", 2, ("mesh.shares=[0,1]",)),
]


@pytest.mark.parametrize(("model", "ranks", "sets"), LAYOUTS)
def test_run_files_equal_one_rank(
    model: str, ranks: int, sets: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", run_file(tmp_path, model), *(word for each in sets for word in ("--set", each))]
    codes = command_on_threads(ranks, "verify", *words, "--dtype", "float64", "--steps", "1", "--failures-only")
    print(*capsys.readouterr(), sep="\n")
    assert codes == [0] * ranks


def test_replicas_in_invariant_mode_are_equal_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", run_file(tmp_path, "t5"), "--set", "mesh.dp=2", "--invariant", "--steps", "1", "--json"]
    assert command_on_threads(2, "verify", *words) == [0] * 2, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["ok"] and row["largest_abs"] == 0 for row in rows)


class Unsummed(CopyToTP):
    """A copy whose gradient stays each rank's own."""

    def start_backward(self, dx_partials: Any, like: Any) -> Pending:
        return Pending.done(local_sum(dx_partials, like))


def memory_gradient_not_summed(model: Any) -> None:
    """Each rank's own heads alone tell the encoder what to change."""
    kv = model["blocks.1.cross.kv"]
    kv.copy = Unsummed(kv.copy.summation, kv.copy.axis)


class Forgetful(Crossing):
    """What the blocks below the first have left is lost."""

    def add(self, grad: Any) -> None:
        self.grad = grad


def memory_gradient_of_one_block(model: Any) -> None:
    new_pass = model.new_pass

    def forgetful(batch: Any) -> Any:
        run = new_pass(batch)
        return replace(run, crossing=Forgetful(run.crossing.source, run.crossing.ids))

    model.new_pass = forgetful


def keys_of_the_next_head(model: Any) -> None:
    heads = model["blocks.0.cross.heads"]
    forward = heads.forward
    heads.forward = lambda q, kv, run: forward(q, np.roll(kv, 1, axis=1), run)


def bias_of_another_head(model: Any) -> None:
    table = model["encoder.blocks.0.attention.heads"].bias.table
    table.data = np.roll(table.data, 1, axis=0)


FAULTS = [
    (memory_gradient_not_summed, "dx", "blocks.1.cross.kv"),
    (memory_gradient_of_one_block, "dx", "to decoder"),
    (keys_of_the_next_head, "y", "blocks.0.cross.heads"),
    (bias_of_another_head, "start", "encoder.blocks.0.attention.heads.bias"),
]


@pytest.mark.parametrize(("plant", "kind", "place"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_fault_is_found_and_named(plant: Any, kind: str, place: str) -> None:
    report = report_of(PAIRS / "t5", 2, plant)
    first = report.first(kind)
    assert first is not None and first.name == place
    assert all(row.ok for row in report.rows if row.kind == "y") or kind != "dx"


STAGES = ["--set", "mesh.pp=3", "--set", "mesh.stages=[2, 1, 1]"]  # the decoder lies on two of them


def test_a_memory_s_gradient_that_stays_on_its_stage_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last stage's blocks read the encoder's output, and what they add to its gradient isn't handed back."""
    monkeypatch.setattr(Memory, "take_grads", lambda self, run, arrays: None)
    words = ["--config", run_file(tmp_path, "t5"), *STAGES, "--dtype", "float64", "--json"]
    assert command_on_threads(3, "verify", *words) == [5] * 3
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert next(row["name"] for row in rows if row["kind"] == "dx" and not row["ok"]) == "to decoder"


def test_a_table_of_distances_that_stages_do_not_sum_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_add_others", lambda param, group, holders: None)
    words = ["--config", run_file(tmp_path, "t5"), *STAGES, "--dtype", "float64", "--json"]
    assert command_on_threads(3, "verify", *words) == [5] * 3
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"] if row["kind"] == "grad"}
    assert rows["blocks.0.attention.heads.bias"]["axis"].startswith("pp: each rank has a summand; nobody sums it")
    assert not rows["encoder.embedding.weight"]["ok"] and rows["final_norm.weight"]["ok"]


def test_a_memory_whose_gradient_nobody_sums_is_refused_by_its_type() -> None:
    def plant(model: Any) -> None:
        kv = model["blocks.0.cross.kv"]
        kv.copy = CopyToTP(kv.copy.summation, "dp")

    with pytest.raises(PlacementError, match=r"blocks\.0\.cross\.kv.*a copy along tp, which sums dx, is missing"):
        report_of(PAIRS / "t5", 2, plant)


def test_types_need_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--types", "--model", str(PAIRS / "bart"), "--ranks", "4096"]) == 0
    shown = capsys.readouterr().out
    assert "encoder.blocks.*.mlp.down" in shown and "blocks.*.cross.kv" in shown and "blocks.0" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "0:1"], "an encoder with a decoder is checked whole"),
        (["--seq", "999"], "exceeds the model's"),
        (["--against-reference", "x.npz"], "models that continue text"),
    ],
)
def test_what_pairs_do_not_have(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(PAIRS / "bart"), *words]) == 2
    assert said in capsys.readouterr().err


def test_random_pairs_have_unequal_lengths_and_edges_on_both_sides() -> None:
    source, make_batches = source_of(SourceArguments(str(PAIRS / "t5"), None, batch=3, seq=8))
    config = source.model.config
    batch = with_edges(make_batches()[0], config, 0, 3)
    assert batch.source is not None and batch.num_targets == len(batch.tokens)
    assert [run.length for run in batch.rows.runs] == [7, 6, 5, 6]
    assert [run.length for run in batch.source.rows.runs] == [8, 7, 6, 6]
    assert max(batch.tokens) == max(batch.source.tokens) == config.vocab_size - 1
