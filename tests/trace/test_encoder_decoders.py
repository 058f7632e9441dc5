"""The ledger of models with an encoder and a decoder equals the closed form of their layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitp.trace.timeline import Trace, read_trace
from tests.command_on_threads import command_on_threads
from tests.verify.test_encoder_decoders import run_file


def check(trace: Trace) -> set[str]:
    """The layers in it; every row is as its formula says."""
    for row in trace.ledger:
        assert row.is_expected and (row.expected_bytes is not None or not row.phase), row
    return {row.place for row in trace.ledger if row.phase}


@pytest.mark.parametrize(
    ("model", "ranks", "sets"),
    [
        ("t5", 3, ("mesh.pp=3", "mesh.stages=[2,1,1]", 'train.recompute="full"')),
        ("bart", 4, ("mesh.pp=2", "mesh.sequence_parallel=true")),
    ],
)
def test_stages_hand_on_what_the_closed_form_says(
    model: str, ranks: int, sets: tuple[str, ...], tmp_path: Path
) -> None:
    words = [run_file(tmp_path, model), *(word for each in sets for word in ("--set", each))]
    assert command_on_threads(ranks, "train", *words, "--trace", str(tmp_path / "t.json")) == [0] * ranks
    trace = read_trace(tmp_path / "t.json")
    check(trace)
    messages = {row.place: row.expected_bytes for row in trace.ledger if row.place.startswith("runner.")}
    assert messages["runner.send"] == messages["runner.expect"] and messages["runner.add_others"]


def test_token_shards_send_what_the_closed_form_says(tmp_path: Path) -> None:
    words = [run_file(tmp_path, "t5"), "--set", "mesh.sequence_parallel=true", "--trace", str(tmp_path / "t.json")]
    assert command_on_threads(3, "train", *words) == [0] * 3
    assert {"encoder.blocks.*.mlp.down", "blocks.*.cross.kv", "loss"} <= check(read_trace(tmp_path / "t.json"))


@pytest.mark.parametrize(
    ("model", "ranks", "sets"),
    [("t5", 3, ()), ("bart", 4, ("mesh.dp=2", "optim.zero=1", 'train.recompute="full"'))],
)
def test_training_sends_what_the_closed_form_says(
    model: str, ranks: int, sets: tuple[str, ...], tmp_path: Path
) -> None:
    words = [run_file(tmp_path, model), *(word for each in sets for word in ("--set", each))]
    assert command_on_threads(ranks, "train", *words, "--trace", str(tmp_path / "t.json")) == [0] * ranks
    trace = read_trace(tmp_path / "t.json")
    needed = {"encoder.embedding", "encoder.blocks.*.mlp.down", "blocks.*.cross.out", "blocks.*.cross.kv", "loss"}
    assert needed <= check(trace) and trace.facts["letters"]["t of targets"] <= 3 * 8
    assert 0 < trace.facts["letters"]["t"] <= 3 * 8
    words = ["--model", str(tmp_path / "run" / "model"), "--prompt", "ab", "--prompt", "bca", "--max-new-tokens", "3"]
    assert command_on_threads(2, "generate", *words, "--beams", "2", "--trace", str(tmp_path / "g.json")) == [0] * 2
    trace = read_trace(tmp_path / "g.json")
    assert "blocks.*.cross.out" in check(trace) and 2 <= trace.facts["letters"]["b"] <= 4
    assert any(row.place == "layered.gather_logits" and row.expected_bytes for row in trace.ledger)
