"""`mpitp verify --against-reference`: what another program saved, and files that are no reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.command_on_threads import command_on_threads

GOLDEN = Path(__file__).resolve().parent.parent / "parity" / "golden"


def verified(case: str, ranks: int, reference: Path) -> list[int]:
    words = ("verify", "--model", str(GOLDEN / case), "--dtype", "float64", "--failures-only")
    return command_on_threads(ranks, *words, "--against-reference", str(reference))


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa", "qwen2", "gemma3", "gpt-neox", "olmo2"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_equals_the_reference(case: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    reference = GOLDEN / case / "golden.npz"
    assert verified(case, ranks, reference) == [0] * ranks
    assert f"with {reference}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["logits", "loss", "grad/transformer.h.1.attn.c_attn.weight"])
def test_what_differs_from_the_reference_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(GOLDEN / "gpt2" / "golden.npz") as arrays:
        changed = {key: arrays[key].copy() for key in arrays.files}
    where = (..., -1) if changed[name].ndim else ()
    changed[name][where] += 1e-3
    np.savez(tmp_path / "changed.npz", **changed)
    assert verified("gpt2", 2, tmp_path / "changed.npz") == [5, 5]
    lines = capsys.readouterr().out.splitlines()
    expected = {"logits": "logits", "loss": "loss"}.get(name, "blocks.1.attention.qkv.weight.v")
    assert lines[1].split()[0] == expected and "DIFFERENT" in lines[1]


@pytest.mark.parametrize("kind", ["missing", "text", "few", "other"])
def test_what_is_no_reference(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ref.npz"
    if kind == "text":
        path.write_text("hello")
    elif kind != "missing":
        with np.load(GOLDEN / "gpt2" / "golden.npz") as arrays:
            chosen = {key: arrays[key] for key in ("tokens", "logits", "loss", "targets")[: 2 if kind == "few" else 4]}
        chosen["targets" if kind == "other" else "tokens"] = np.zeros((1, 3))
        np.savez(path, **chosen)
    assert verified("gpt2", 2, path) == [4, 4]
    error = capsys.readouterr().err
    assert str(path) in error and "Traceback" not in error
