"""A run that is refused, or fails before its first step, leaves nothing: no folder, no lock, no empty log."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitp.errors import MpitpError
from mpitp.train.lock import RunLock
from tests.train.kinds_case import settings_of
from tests.train.run_case import config, files, make_data, run

# model (a decoder where it is ""), ranks, keys of the run file, and what is said
REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    ("t5", 5, {"mesh_cp": 5, "train_invariant": True}, "can't go together"),
    ("t5", 6, {"mesh_pp": 6}, "the model has 5"),
    ("vit", 5, {"mesh_pp": 5}, "the model has 4"),
    ("vit", 4, {"train_invariant": True}, "can't go to 4 ranks"),
    ("bert", 2, {"mesh_pp": 2, "train_global_batch_size": 1}, "stages need at least 2"),
    ("bert", 2, {"mesh_sequence_parallel": True, "train_invariant": True}, "can't both be true"),
    ("roberta", 2, {"mesh_ep": 2}, "has none"),
    ("distilbert", 2, {"mesh_pp": 2, "mesh_stages": [1, 1]}, "use such as"),
    ("bart", 2, {"train_invariant": True, "train_invariant_blocks": 9}, "exceeds"),
    ("bart", 4, {"mesh_dp": 3}, "the job has 4"),
    ("", 7, {"train_invariant": True}, "can.t go to 7 ranks"),
    ("", 4, {"mesh_pp": 4}, "the model has"),
    ("", 2, {"model_from": "cut", "mesh_dp": 2}, "cut"),
    ("", 3, {"resume": "nothing"}, "nothing"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text, and a model whose weights end too early."""
    folder = tmp_path_factory.mktemp("refused")
    run(1, config(make_data(folder), folder / "whole", train_steps=1, checkpoint_every=0, train_eval_every=0))
    (folder / "whole/model").rename(folder / "cut")
    os.truncate(folder / "cut/model.safetensors", 5000)
    return folder


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("model", "ranks", "changes", "words"), REFUSED, ids=str)
def test_nothing_is_left(
    model: str, ranks: int, changes: dict[str, Any], words: str, there: bool, folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "new/deeper/run"
    if there:
        place.mkdir(parents=True)
        (place / "note.txt").write_text("mine")
    resume = changes.get("resume") and str(tmp_path / changes["resume"])
    changes = {key: value for key, value in changes.items() if key != "resume"}
    if "model_from" in changes:
        kept = {f"model_{key}": None for key in config(folder / "data", place).model.fields}
        changes |= kept | {"model_from": str(folder / changes["model_from"])}
    mesh = {key.removeprefix("mesh_"): changes.pop(key) for key in list(changes) if key.startswith("mesh_")}
    with pytest.raises(MpitpError, match=words):
        if model:
            settings = settings_of(model, changes, mesh, place)
        else:
            settings = config(folder / "data", place, **changes, **{f"mesh_{key}": size for key, size in mesh.items()})
        run(ranks, settings, resume=resume)
    assert files(tmp_path) == ({"new/deeper/run/note.txt": b"mine"} if there else {})
    assert (tmp_path / "new").exists() == there


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_fails_in_the_first_step_leaves_nothing(ranks: int, tmp_path: Path) -> None:
    """A folder of images of which one can't be read, which is found out when it is due."""
    pytest.importorskip("PIL.Image")
    for label in "ab":
        (tmp_path / "images" / label).mkdir(parents=True)
        (tmp_path / "images" / label / "1.png").write_bytes(b"\x89PNG no image")
    settings = settings_of("vit", {"train_eval_every": 0}, {"dp": ranks}, tmp_path / "run")
    settings = replace(settings, data=replace(settings.data, train=str(tmp_path / "images"), valid=None))
    with pytest.raises(MpitpError, match="can't be read as an image"):
        run(ranks, settings)
    assert not (tmp_path / "run").exists()


def test_a_lock_that_was_taken_away_keeps_nobody_out(tmp_path: Path) -> None:
    """The job that made it has ended, and another one, which waited for it, holds a file that is in no folder."""
    lock = RunLock(tmp_path)
    opened = lock._open
    seen: list[int] = []

    def open_and_lose() -> int:
        seen.append(descriptor := opened())
        if len(seen) == 1:
            lock.path.unlink()
        return descriptor

    lock._open = open_and_lose  # type: ignore[method-assign]
    with lock:
        assert len(seen) == 2 and os.path.samestat(lock.path.stat(), os.fstat(lock._descriptor))


def test_a_run_that_has_got_somewhere_keeps_its_files(tmp_path: Path) -> None:
    run(1, settings_of("vit", {"train_steps": 1, "train_eval_every": 0}, {}, tmp_path / "run"))
    assert {"metrics.jsonl", ".lock", "model"} <= {path.name for path in (tmp_path / "run").iterdir()}
