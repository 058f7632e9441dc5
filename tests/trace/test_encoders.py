"""The ledger of encoders and vision transformers equals the closed form of their layers, alone and with replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitp.trace.timeline import read_trace
from tests.command_on_threads import command_on_threads
from tests.verify.test_encoders import run_file

LAYOUTS = {
    "tp": (3, []),
    "replicas": (4, ["mesh.dp=2", "optim.zero=1"]),
    "sequence parallelism": (3, ["mesh.sequence_parallel=true"]),
    "sequences": (4, ["mesh.cp=2"]),
    "stages": (4, ["mesh.pp=2", "optim.zero=3", "mesh.dp=2", 'train.recompute="full"']),
    "stages of a head alone": (2, ["mesh.pp=2", "mesh.stages=[2, 0]"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["classification", "image"])
def test_training_sends_what_the_closed_form_says(kind: str, layout: str, tmp_path: Path) -> None:
    ranks, sets = LAYOUTS[layout]
    words = [run_file(tmp_path, kind), "--trace", str(tmp_path / "t.json")]
    words += [word for each in sets for word in ("--set", each)]
    assert command_on_threads(ranks, "train", *words) == [0] * ranks
    trace = read_trace(tmp_path / "t.json")
    layers = {row.place: row for row in trace.ledger if row.phase}
    if not layout.startswith("stages"):
        assert {"blocks.*.attention.out", "blocks.*.mlp.down", "loss"} <= layers.keys()
        assert ("head.pooler.gather" if kind == "classification" else "patches") in layers
    for row in trace.ledger:
        assert row.is_expected and (row.expected_bytes is not None or not row.phase), row
    rows = {"classification": 16, "image": 10}  # at most; an image has 3 x 3 patches and a class token
    assert 0 < trace.facts["letters"]["t"] <= 3 * rows[kind]
