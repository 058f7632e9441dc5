"""Checkpoints: whole or not there, the same bytes from any rank count, damage found, failures that cost nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mpitp.checkpoint.safetensors_file
from mpitp.checkpoint import manifest, training
from mpitp.checkpoint.existing import checkpoints, find_damage, newest_whole, read_state
from mpitp.checkpoint.load import load_model
from mpitp.checkpoint.training import BackgroundSave, Contents, Save, load_arrays
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import FileError
from mpitp.layers.site import make_site
from mpitp.models import CausalLM, config_from_hf, new_model
from tests.models.model_cases import GPT2, LLAMA
from tests.sharded import assert_same_bits, weights
from tests.train.run_case import files

CASES: dict[str, Mapping[str, Any]] = {"gpt2": GPT2, "llama": LLAMA}
SERIAL = SerialGroup()


def moments_of(model: CausalLM, scale: float) -> dict[str, dict[str, Any]]:
    """Arrays that differ from the parameters and from one another."""
    return {
        "exp_avg": {name: param.data * scale for name, param in model.named_params()},
        "exp_avg_sq": {name: param.data**2 for name, param in model.named_params()},
    }


def contents(model: CausalLM, step: int) -> Contents:
    config = {"model_type": model.config.hf["model_type"], **model.config.hf}
    state = {"format": manifest.FORMAT, "step": step}
    return Contents(model, moments_of(model, 3.0), "float32", config, state, {}, {"tokenizer.json": b"{}"})


def save(group: Group, root: Path, step: int, name: str = "gpt2", keep: int = 3, seed: int = 7) -> CausalLM:
    model = new_model(config_from_hf(CASES[name]), make_site(group), seed=seed)
    saving = Save(root, step, contents(model, step), group, keep)
    saving.run()
    saving.wait_for_removal()
    return model


def saved(root: Path, *steps: int, keep: int = 9) -> list[Path]:
    """Checkpoints of a one-rank model, newest first."""
    for step in steps:
        save(SERIAL, root, step, keep=keep)
    return checkpoints(root)


@pytest.mark.parametrize("name", CASES)
def test_what_is_in_it(tmp_path: Path, name: str) -> None:
    model = save(SERIAL, tmp_path, 5, name)
    (path,) = checkpoints(tmp_path)
    optimizer = ["optimizer/exp_avg.safetensors", "optimizer/exp_avg_sq.safetensors"]
    small = ["config.json", "state.json", "tokenizer.json"]
    assert path.name == "step-00000005"
    assert sorted(files(path)) == sorted([*small, "manifest.json", "model.safetensors", *optimizer])
    tensors = load_file(path / "model.safetensors")
    assert_same_bits(
        weights(SERIAL, load_model(path, make_site(SERIAL)).named_params()), weights(SERIAL, model.named_params())
    )
    assert_same_bits(load_file(path / optimizer[0]), {key: value * 3.0 for key, value in tensors.items()})
    assert_same_bits(load_file(path / optimizer[1]), {key: value**2 for key, value in tensors.items()})
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert {key: len(content) for key, content in files(path, ["manifest.json"]).items()} == {
        key: entry["bytes"] for key, entry in listed.items()
    }


def test_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    for name in ("write_json", "write_file", "publish", "sync_file", "sync_directory"):
        original = getattr(training, name)

        def spy(path: Path, *rest: Any, original: Callable[..., Any] = original, name: str = name) -> Any:
            written.append(f"{name} {path.name}".replace(".partial", ""))
            return original(path, *rest)

        monkeypatch.setattr(training, name, spy)
    save(SERIAL, tmp_path, 5)
    assert written[-3].endswith("manifest.json") and written[-2:] == ["sync_directory optimizer", written[-1]]
    assert written[-1].startswith("publish .step-00000005.")


@pytest.mark.parametrize("name", CASES)
def test_any_rank_count_writes_the_same_bytes_and_reads_them(tmp_path: Path, name: str) -> None:
    model = save(SERIAL, tmp_path / "1", 5, name)
    expected = files(tmp_path / "1" / "step-00000005")
    whole = weights(SERIAL, model.named_params())
    path = tmp_path / "1" / "step-00000005"

    def read(group: Group) -> None:
        other = new_model(config_from_hf(CASES[name]), make_site(group), seed=8)
        moments = moments_of(other, 1.0)
        load_arrays(path, other, moments)
        assert_same_bits(weights(group, other.named_params()), whole)
        for parameter, param in other.named_params():
            np.testing.assert_array_equal(moments["exp_avg"][parameter], param.data * np.float32(3))

    for ranks in (2, 3, 4, 5):
        run_threads(ranks, save, tmp_path / str(ranks), 5, name)
        assert files(tmp_path / str(ranks) / "step-00000005") == expected
        run_threads(ranks, read)


def test_large_files_have_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 1000)
    for ranks in (1, 3):
        run_threads(ranks, save, tmp_path / str(ranks), 5)
        (path,) = checkpoints(tmp_path / str(ranks))
        listed = json.loads((path / "manifest.json").read_text())["files"]["model.safetensors"]
        assert len(listed["crc32"]) == -(-listed["bytes"] // 1000) > 3
        flip(path / "model.safetensors", -1)
        assert (
            run_threads(ranks, lambda group, path=path: find_damage(path, group))
            == ["model.safetensors doesn't match its checksum"] * ranks
        )
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        save(SERIAL, tmp_path, step, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000100", "step-00000015"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000015", "step-00000100"]


def test_those_set_aside_go_when_their_turn_comes(tmp_path: Path) -> None:
    for name in ("aside-step-00000002", "aside-step-00000003", "aside-step-00000005", "aside-notes", "aside-step-x"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        save(SERIAL, tmp_path, step, keep=2)
    names = {path.name for path in tmp_path.iterdir()}
    steps = {"step-00000002", "step-00000003"}
    assert names == {*steps, "aside-step-00000003", "aside-step-00000005", "aside-notes", "aside-step-x"}
    save(SERIAL, tmp_path, 4, keep=2)
    assert not (tmp_path / "aside-step-00000003").exists() and (tmp_path / "aside-step-00000005").exists()


def test_latest_is_found_by_looking(tmp_path: Path) -> None:
    for step in (20, 3):
        save(SERIAL, tmp_path, step)
    (tmp_path / "step-latest").mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert newest_whole(tmp_path, SERIAL, pytest.fail) == tmp_path / "step-00000020"
    assert newest_whole(tmp_path / "nothing", SERIAL, pytest.fail) is None


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda p: os.truncate(p / "model.safetensors", 99), "model.safetensors has 99 bytes, its manifest"),
    "empty": (lambda p: os.truncate(p / "state.json", 0), "state.json has 0 bytes"),
    "flipped bit": (lambda p: flip(p / "optimizer/exp_avg_sq.safetensors", -3), "exp_avg_sq.safetensors doesn't match"),
    "flipped bit in the state": (lambda p: flip(p / "state.json", 4), "state.json doesn't match"),
    "missing": (lambda p: (p / "optimizer/exp_avg.safetensors").unlink(), "exp_avg.safetensors is missing"),
    "missing part": (lambda p: shutil.rmtree(p / "optimizer"), "safetensors is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "it has no manifest.json"),
    "half a manifest": (lambda p: os.truncate(p / "manifest.json", 40), "manifest.json is not JSON"),
    "empty manifest": (lambda p: os.truncate(p / "manifest.json", 0), "manifest.json is not JSON"),
    "manifest of zeros": (lambda p: (p / "manifest.json").write_bytes(b"\0" * 99), "manifest.json is not JSON"),
    "manifest of text": (lambda p: (p / "manifest.json").write_text('"x"'), "must hold a JSON object"),
    "without files": (lambda p: rewrite(p / "manifest.json", lambda m: m.pop("files")), "garbled"),
    "list of files": (lambda p: rewrite(p / "manifest.json", lambda m: m.update(files=[1])), "garbled"),
    "no sums": (lambda p: rewrite(p / "manifest.json", lambda m: m["files"]["state.json"].pop("crc32")), "garbled"),
    "few sums": (
        lambda p: rewrite(p / "manifest.json", lambda m: m["files"]["state.json"].update(crc32=[])),
        "garbled",
    ),
    "no size": (
        lambda p: rewrite(p / "manifest.json", lambda m: m["files"]["state.json"].update(bytes="9")),
        "garbled",
    ),
    "no state": (lambda p: rewrite(p / "manifest.json", lambda m: m["files"].pop("state.json")), "garbled"),
    "out of the way": (
        lambda p: rewrite(p / "manifest.json", lambda m: m["files"].update({"../x": {"bytes": 0, "crc32": [0]}})),
        "garbled",
    ),
    "a folder in place of a file": (
        lambda p: ((p / "state.json").unlink(), (p / "state.json").mkdir()),
        "state.json is missing",
    ),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_one_is_skipped_with_a_notice(tmp_path: Path, damage: str, ranks: int) -> None:
    newest, before = saved(tmp_path, 5, 10)
    break_it, words = DAMAGES[damage]
    break_it(newest)
    said: list[str] = []

    def rank(group: Group) -> Path | None:
        return newest_whole(tmp_path, group, said.append)

    assert run_threads(ranks, rank) == [before] * ranks
    assert len(said) == ranks and len(set(said)) == 1
    assert said[0].startswith(f"{newest} is skipped: ") and words in said[0]


def test_directory_that_does_not_exist(tmp_path: Path) -> None:
    assert find_damage(tmp_path / "nowhere", SERIAL) == "it doesn't exist"


def test_unpublished_ones_are_nothing_and_go_with_the_next_save(tmp_path: Path) -> None:
    (whole,) = saved(tmp_path, 5)
    shutil.copytree(whole, tmp_path / ".step-00000010.ab12.partial")
    shutil.copytree(whole, tmp_path / ".step-00000004.ab12.old")
    assert newest_whole(tmp_path, SERIAL, pytest.fail) == whole
    save(SERIAL, tmp_path, 10)
    assert sorted(os.listdir(tmp_path)) == ["step-00000005", "step-00000010"]


def test_a_damaged_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    newest, _ = saved(tmp_path, 5, 10)
    (newest / "manifest.json").unlink()
    save(SERIAL, tmp_path, 10)
    assert find_damage(newest, SERIAL) is None
    assert sorted(os.listdir(tmp_path)) == ["step-00000005", "step-00000010"]


@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_newer_format_is_refused_not_skipped(tmp_path: Path, file: str) -> None:
    newest, _ = saved(tmp_path, 5, 10)
    rewrite(newest / file, lambda value: value.update(format=2))
    for ranks in (1, 2):
        with pytest.raises(FileError, match=r"format 2 is not the one that this version reads \(1\)"):
            run_threads(ranks, lambda group: newest_whole(tmp_path, group, pytest.fail))


def test_state_is_checked(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no state.json, so it is no checkpoint"):
        read_state(tmp_path)
    for state, words in (({"format": 1}, "step is None"), ({"format": 1, "step": 0}, "step is 0"), ({}, "format None")):
        (tmp_path / "state.json").write_text(json.dumps(state))
        with pytest.raises(FileError, match=words):
            read_state(tmp_path)


def test_missing_optimizer_part_names_what_is_missing(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 5)
    model = new_model(config_from_hf(GPT2), make_site(SERIAL), seed=1)
    (path / "optimizer/exp_avg_sq.safetensors").unlink()
    with pytest.raises(FileError, match="optimizer holds neither exp_avg_sq.safetensors nor an index"):
        load_arrays(path, model, moments_of(model, 1.0))


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the `after`-th write of a tensor, and all that come after it, meet a full disk."""
    real, count, lock = os.pwrite, [0], threading.Lock()

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        with lock:
            count[0] += 1
        if count[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(mpitp.checkpoint.safetensors_file.os, "pwrite", pwrite)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, background: bool
) -> None:
    (before,) = saved(tmp_path, 5)
    full_disk(monkeypatch, after=7)

    def rank(group: Group) -> None:
        model = new_model(config_from_hf(GPT2), make_site(group), seed=1)
        upcoming = Save(tmp_path, 10, contents(model, 10), group, 1)
        with pytest.raises(FileError, match=r"can't write .*safetensors: No space left on device"):
            if background:
                BackgroundSave(upcoming).advance(wait=True)
            else:
                upcoming.run()

    run_threads(ranks, rank)
    assert os.listdir(tmp_path) == [before.name]
    assert newest_whole(tmp_path, SERIAL, pytest.fail) == before


@pytest.mark.parametrize(
    "where", ["write_json", "write_file", "create_file", "make_manifest", "write_owned", "publish"]
)
def test_an_exception_anywhere_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (before,) = saved(tmp_path, 5)

    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("a bug on purpose")

    with monkeypatch.context() as patch, pytest.raises((KeyError, RuntimeError), match="a bug on purpose"):
        patch.setattr(training, where, fail)
        run_threads(2, save, tmp_path, 10, "gpt2", 1)
    assert os.listdir(tmp_path) == [before.name]
    assert find_damage(before, SERIAL) is None


def test_unwritable_place_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="can't create .*: Not a directory"):
        run_threads(2, save, tmp_path / "file" / "checkpoints", 5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_background_save_writes_what_was_there_when_it_began(tmp_path: Path, ranks: int) -> None:
    run_threads(ranks, save, tmp_path / "foreground", 5)

    def rank(group: Group) -> None:
        model = new_model(config_from_hf(GPT2), make_site(group), seed=7)
        under_way = BackgroundSave(Save(tmp_path / "background", 5, contents(model, 5), group, 3))
        while not under_way.advance():
            group.barrier()
        assert under_way.seconds > 0

    run_threads(ranks, rank)
    assert files(tmp_path / "background") == files(tmp_path / "foreground")
