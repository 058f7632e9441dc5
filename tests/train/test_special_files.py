"""A pipe or an endless device where one of mpitp's files belongs: one message and a code at once, whichever it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mpitp.cli import main
from tests.train.run_case import make_data, tables, write_run_file

# The file, and the verb that meets it.
FILES = {
    "run.toml": "train",
    "prompts.txt": "generate",
    "data/train/manifest.json": "train",
    "data/train/tokens.bin": "train",
    "data/train/tokenizer/tokenizer.json": "train",
    "data/train/tokenizer/tokenizer_config.json": "train",
    "run/model/config.json": "generate",
    "run/model/generation_config.json": "generate",
    "run/model/tokenizer.json": "generate",
    "run/model/tokenizer_config.json": "generate",
    "run/model/model.safetensors": "generate",
    "run/checkpoints/step-00000002/state.json": "resume",
    "run/checkpoints/step-00000002/model.safetensors": "resume",
    "run/checkpoints/step-00000002/config.json": "resume",
    "config.json": "step",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_data(folder)
    changes = {"train_steps": 2, "checkpoint_every": 2, "train_eval_every": 0}
    run_file = write_run_file(folder / "run.toml", tables(folder / "data", folder / "run", **changes))
    assert main(["train", str(run_file)]) == 0
    (folder / "prompts.txt").write_text("To be\n")
    shutil.copy(folder / "run/model/config.json", folder / "config.json")
    return folder


def command(verb: str, folder: Path) -> list[str]:
    if verb == "generate":
        return ["generate", "--model", str(folder / "run/model"), "--prompts", str(folder / "prompts.txt")]
    if verb == "step":
        return ["step", "--config", str(folder / "config.json"), "--list"]
    words = ["train", str(folder / "run.toml")]
    if verb == "resume":
        return [*words, "--set", "train.steps=3", "--resume", str(folder / "run/checkpoints/step-00000002")]
    return [*words, "--set", f"train.run_dir={folder / 'new'}"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", FILES)
def test_special_files_are_refused(
    trained: Path, name: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    place = folder / name
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace(str(trained), str(folder)))
    assert place.is_file(), os.listdir(place.parent)
    place.unlink()
    os.mkfifo(place) if kind == "pipe" else place.symlink_to("/dev/zero")
    capfd.readouterr()
    assert main(command(FILES[name], folder)) in (3, 4)
    said = capfd.readouterr().err
    assert place.name in said and "Traceback" not in said, said
    assert f"is a {kind}" in said or "is missing" in said or "has 0 bytes" in said, said  # of one that a manifest lists
