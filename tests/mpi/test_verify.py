"""`mpitp verify` on real MPI ranks: a sound layout is equal, a planted fault is named, exit codes agree everywhere."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from examples.planted_bugs import FAULTS
from mpitp.checkpoint.load import load_config
from mpitp.comm import Group
from mpitp.errors import ConfigError
from mpitp.verify import command

pytestmark = pytest.mark.mpi

GOLDEN = Path(__file__).resolve().parents[1] / "parity/golden"
NAMED = {  # faults that are ones at any rank count above one, and the model to plant each in
    "missing all-reduce forward": "llama-gqa",
    "missing all-reduce of dx": "llama-gqa",
    "bias added on every rank": "gpt2",
    "fused qkv cut straight through": "gpt2",
    "vocabulary shard off by one": "llama-gqa",
    "target logits counted twice": "gpt2",
    "norm counts replicas": "llama-gqa",
    "tied gradients not added": "gpt2",
    "RoPE pairs interleaved": "llama-gqa",
}


def verify(*words: str) -> int:
    """The command, without what `main` sets up for a process of its own."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.mark.parametrize("model", ["gpt2", "llama-gqa", "llama-mqa-bias", "qwen2"])
def test_layout_is_equal_in_float64(model: str, world: Group) -> None:
    words = ("--dtype", "float64", "--steps", "2", "--finite-differences", "5")
    assert verify("--model", str(GOLDEN / model), *words) == 0


@pytest.mark.parametrize("model", ["gpt2", "llama-gqa"])
def test_report(model: str, world: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--model", str(GOLDEN / model)) == 0
    text = capsys.readouterr().out
    assert (f"of {world.size} rank" in text) if world.rank == 0 else text == ""


@pytest.mark.parametrize("model", ["gpt2", "llama-gqa"])
def test_invariant_mode_is_equal_to_the_bit(model: str, world: Group) -> None:
    words = ("--model", str(GOLDEN / model), "--invariant", "--steps", "3")
    if world.size <= load_config(GOLDEN / model).heads:
        assert verify(*words) == 0
    else:
        with pytest.raises(ConfigError, match=f"can't go to {world.size} ranks; use at most"):
            verify(*words)


@pytest.mark.parametrize(("fault", "model"), NAMED.items())
def test_fault_is_named(fault: str, model: str, world: Group, capsys: pytest.CaptureFixture[str]) -> None:
    with FAULTS[fault].planted():
        assert verify("--model", str(GOLDEN / model), "--json") == (5 if world.size > 1 else 0)
    if world.rank == 0 and world.size > 1:
        first = json.loads(capsys.readouterr().out)["first_in"]
        assert set(FAULTS[fault].seen.values()) <= set(first.values())
