"""`mpitp verify --types`: the letters between all layers, on ranks that don't run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mpitp.checkpoint.load import load_config
from mpitp.cli import main
from mpitp.comm import SerialGroup
from mpitp.errors import PlacementError
from mpitp.layers import Layer, make_site
from mpitp.models import registry
from tests.train.run_case import make_data, tables, write_run_file

MODEL = str(Path(__file__).resolve().parent.parent / "parity" / "golden" / "llama-gqa")


def test_letters_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--types", "--model", MODEL, "--ranks", "2", "--json"]) == 0
    rows = {row["layer"]: row for row in json.loads(capsys.readouterr().out)["layers"]}
    letters = {name: (row["takes"], row["gives"], row["columns"]) for name, row in rows.items()}
    whole, cut = "I along tp", "V along tp"
    assert letters["embedding"] == (whole, whole, "")
    assert letters["blocks.*.attention.qkv"] == (whole, cut, "q, k, v")
    assert letters["blocks.*.attention.heads"] == (cut, cut, "o")
    assert letters["blocks.*.attention.out"] == (cut, whole, "")
    assert letters["blocks.*.mlp.gate_up"] == (whole, cut, "gate, up")
    assert letters["head"] == (whole, cut, "vocab") and letters["loss"] == (cut, whole, "")
    assert not [name for name in rows if name.startswith("blocks.0")], "blocks that are alike are told once"


def test_thousands_of_ranks_take_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = write_run_file(tmp_path / "run.toml", tables(make_data(tmp_path), tmp_path / "run"))
    capsys.readouterr()
    seconds = []
    for ranks in (2, 4096):
        started = time.perf_counter()
        assert main(["verify", "--types", "--config", str(run_file), "--ranks", str(ranks)]) == 0
        seconds.append(time.perf_counter() - started)
        assert f"the types fit: 19 kinds of layers on {ranks} ranks" in capsys.readouterr().out
    assert seconds[1] < 20 * seconds[0] + 1


def test_a_sum_that_is_forgotten_ends_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_sum(config: object, site: object) -> object:
        assert site.device.name == "abstract", "damaged models must not be allocated"  # type: ignore[attr-defined]
        model = original(config, site)  # type: ignore[arg-type]
        down: Layer = model["blocks.1.mlp.down"]
        down.placements = lambda incoming: incoming.changed("tp", "P")  # type: ignore[method-assign]
        return model

    original = registry._put_together
    monkeypatch.setattr(registry, "_put_together", without_sum)
    assert main(["verify", "--types", "--model", MODEL]) == 3
    error = capsys.readouterr().err
    assert "blocks.1" in error and "P (partial)" in error and "made by blocks.1.mlp" in error
    with pytest.raises(PlacementError, match="along tp"):
        registry.build_model(load_config(MODEL), make_site(SerialGroup()))


@pytest.mark.parametrize("words", [("--ranks", "3"), ("--types", "--ranks", "0")])
def test_ranks_go_with_types(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", MODEL, *words]) == 2
    assert "--ranks" in capsys.readouterr().err
