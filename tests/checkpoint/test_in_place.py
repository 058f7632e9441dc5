"""Parameters that are a file's own bytes: which ones are, that they are the same numbers, and that the file stays as it
is."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint import in_place, load_config, load_model
from mpitp.comm.threads import run_threads
from mpitp.convert.rounding import round_weights
from mpitp.layers.site import make_site
from mpitp.ops.groupwise import Grouping
from tests.convert.test_rounding import save

GOLDEN = Path(__file__).resolve().parent.parent / "parity" / "golden"


def lies_in_a_file(array: np.ndarray) -> bool:
    owner = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap)


def loaded(directory: Path, ranks: int, *, is_in_place: bool) -> list[dict[str, np.ndarray]]:
    """Every rank's parameters."""

    def load(group):
        model = load_model(directory, make_site(group), in_place=is_in_place)
        return {name: param.data for name, param in model.named_params()}

    return run_threads(ranks, load)


@pytest.fixture
def of_any_size(monkeypatch):
    monkeypatch.setattr(in_place, "SMALLEST_BYTES", 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "qwen2"])
def test_the_same_numbers(of_any_size, name, ranks):
    copies, lying = (loaded(GOLDEN / name, ranks, is_in_place=way) for way in (False, True))
    for copied, own in zip(copies, lying, strict=True):
        assert copied.keys() == own.keys()
        for param in copied:
            assert own[param].tobytes() == copied[param].tobytes(), param
            assert own[param].shape == copied[param].shape and own[param].flags.writeable
        assert not any(map(lies_in_a_file, copied.values()))


def test_what_one_rank_has_in_the_file(of_any_size):
    """All that the file has as it is wanted, gate and up as one; q, k and v have another order there."""
    (params,) = loaded(GOLDEN / "llama-gqa", 1, is_in_place=True)
    copied = {name.rpartition(".attention.")[2] for name, data in params.items() if not lies_in_a_file(data)}
    assert copied == {"qkv.weight"}


def test_what_a_rank_of_two_has_in_the_file(of_any_size):
    """Tables cut by rows, and what every rank has whole; no columns of matrices, no halves of gate and up."""
    for params in loaded(GOLDEN / "llama-gqa", 2, is_in_place=True):
        lying = {name.rpartition(".")[0] for name, data in params.items() if lies_in_a_file(data)}
        assert {"embedding", "final_norm", "blocks.0.norm1"} <= lying
        assert not any(name.endswith(("qkv", "out", "gate_up", "down")) for name in lying)


def test_small_ones_are_read():
    (params,) = loaded(GOLDEN / "llama-gqa", 1, is_in_place=True)
    assert all(lies_in_a_file(data) == (data.nbytes >= in_place.SMALLEST_BYTES) for data in params.values())


def test_writing_changes_no_file(of_any_size, tmp_path):
    path = tmp_path / "model.safetensors"
    for file in (GOLDEN / "llama-gqa").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = path.read_bytes()
    (params,) = loaded(tmp_path, 1, is_in_place=True)
    path.unlink()  # who has opened it keeps it
    kept = params["embedding.weight"].copy()
    params["embedding.weight"][...] = 7.0
    path.write_bytes(before)
    (again,) = loaded(tmp_path, 1, is_in_place=True)
    assert np.array_equal(again["embedding.weight"], kept) and (params["embedding.weight"] == 7.0).all()


def test_codes_lie_there_and_scales_in_float16_are_widened(of_any_size, tmp_path):
    round_weights(save(tmp_path / "floats"), tmp_path / "int8", Grouping(8))
    config = load_config(tmp_path / "int8")
    assert config.grouping is not None
    copies, lying = (loaded(tmp_path / "int8", 1, is_in_place=way)[0] for way in (False, True))
    assert all(np.array_equal(lying[name], copies[name]) for name in copies)
    assert lies_in_a_file(lying["blocks.0.mlp.down.weight"])
    assert not lies_in_a_file(lying["blocks.0.mlp.down.weight_scale"])


def test_numbers_that_lie_across_their_own_size_are_read(of_any_size, tmp_path):
    """A header of an odd length, as the format allows: arrays of NumPy's kind can't begin there."""
    for file in (GOLDEN / "llama-gqa").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].rstrip() + b" "
    text += b" " * (1 - (8 + len(text)) % 2)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    (params,) = loaded(tmp_path, 1, is_in_place=True)
    (copies,) = loaded(GOLDEN / "llama-gqa", 1, is_in_place=False)
    assert all(np.array_equal(params[name], copies[name]) for name in copies)
    assert not any(map(lies_in_a_file, params.values()))
