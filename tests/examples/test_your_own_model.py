"""A model type from outside of mpitp: trained, saved, loaded, verified, stepped through and traced like any other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import your_own_model
from examples.your_own_model import RAW, TWO_GATES, run
from mpitp.cli import main
from mpitp.comm import run_threads
from mpitp.errors import ConfigError, UsageError
from mpitp.models import MODEL_TYPES, ModelType, config_from_hf, llama, register_model, registry


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(MODEL_TYPES)
    yield
    MODEL_TYPES.clear()
    MODEL_TYPES.update(before)


@pytest.fixture
def registered() -> None:
    register_model("two_gates", TWO_GATES)


@pytest.mark.usefixtures("registered")
def test_the_same_losses_at_every_rank_count(tmp_path: Path) -> None:
    losses = [run_threads(ranks, run, str(tmp_path / str(ranks)))[0] for ranks in (1, 2, 3, 5)]
    for others in losses[1:]:
        np.testing.assert_allclose(others, losses[0], rtol=1e-12)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.usefixtures("registered")
def test_every_program_knows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(RAW))
    assert main(["step", "-n", "3", "--config", str(config), "--list"]) == 0
    listed = capsys.readouterr().out
    assert "blocks.0.attention.qkv" in listed and "blocks.1.mlp.down" in listed
    assert main(["step", "--config", str(config), "--html", str(tmp_path / "page.html")]) == 0
    (tmp_path / "text.txt").write_text("abc " * 200)
    assert (
        main(["data", "prepare", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "d")]) == 0
    )
    fields = {key: value for key, value in RAW.items() if key != "vocab_size"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        "[model]\n" + "\n".join(lines) + f'\n[data]\ntrain = "{tmp_path / "d"}"\nseq_len = 8\n'
        f'[train]\nsteps = 2\nmicro_batch_size = 2\nglobal_batch_size = 2\nrun_dir = "{tmp_path / "r"}"\n'
    )
    assert main(["train", str(run_file), "--trace", str(tmp_path / "trace.json")]) == 0
    assert main(["verify", "--config", str(run_file)]) == 0
    assert main(["generate", "--model", str(tmp_path / "r" / "model"), "--prompt", "ab", "--max-new-tokens", "2"]) == 0


def test_an_installed_package_brings_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = {
        "two_gates": "examples.your_own_model:TWO_GATES",
        "broken": "examples.your_own_model:RAW",
        "absent": "examples.your_own_model:THREE_GATES",
        "moved": "examples.no_such_file:TWO_GATES",
    }
    points = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in offers.items())
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))
    assert config_from_hf(RAW).model_type == "two_gates" and MODEL_TYPES["two_gates"] is TWO_GATES
    with pytest.raises(ConfigError, match="broken = examples.your_own_model:RAW of mpitp.models is no ModelType"):
        config_from_hf(RAW | {"model_type": "broken"})
    for name in ("absent", "moved"):
        with pytest.raises(ConfigError, match=f"{name} = examples.* of mpitp.models can't be loaded: .*(no|No) "):
            config_from_hf(RAW | {"model_type": name})


def test_a_slip_is_told_beside_what_packages_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("three_doors", "nowhere:MODEL", registry.ENTRY_POINTS)])
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))
    with pytest.raises(ConfigError, match="supported: gpt2, .*, three_doors; was 'three_doors' meant?"):
        config_from_hf(RAW | {"model_type": "three_door"})
    with pytest.raises(ConfigError, match="registered by register_model or an entry point of the group mpitp.models"):
        config_from_hf(RAW | {"model_type": "unheard-of"})


def test_what_would_be_another_type_in_silence_is_refused() -> None:
    def read(raw: Any) -> Any:
        return llama.read_config({**raw, "model_type": "llama"})

    other = ModelType(read, TWO_GATES.build_block, TWO_GATES.norm, TWO_GATES.hf_pieces, ())
    register_model("two_gates", other)
    with pytest.raises(ConfigError, match="'two_gates': its read_config gives a config of 'llama'"):
        config_from_hf(RAW)
    with pytest.raises(UsageError, match="there is a model type 'llama' already"):
        register_model("llama", other)


def test_alone_it_proves_itself() -> None:
    import subprocess

    command = [sys.executable, str(Path(your_own_model.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, second = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert first == second and first.endswith("verified after loading")
