"""Training of a vision transformer on a folder, an .npz and an IDX file, and `mpitp classify` with what it learnt."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mpitp.config import RunConfig, run_config_from
from mpitp.data.images import PREPROCESSOR, Preprocessing, load_image, open_images, preprocessing_of, unfold
from mpitp.errors import FileError, MpitpError
from tests.command_on_threads import command_on_threads
from tests.train.run_case import changed, losses, run

SIDE = 8
MODEL = {
    "model_type": "vit",
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 24,
    "image_size": SIDE,
    "patch_size": 3,
    "num_channels": 1,
    "initializer_range": 0.2,
    "dtype": "float64",
}


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bars that lie (0) or stand (1), somewhere, in noise."""
    rng = np.random.default_rng(seed)
    pixels, labels = rng.integers(0, 60, (count, SIDE, SIDE), dtype=np.uint8), rng.integers(0, 2, count)
    for image, label in zip(pixels, labels, strict=True):
        (image.T if label else image)[rng.integers(SIDE - 2)] = 255
    return pixels, labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in all three forms."""
    folder = tmp_path_factory.mktemp("images")
    for part, (pixels, labels) in {"train": images(48, 1), "valid": images(20, 2)}.items():
        np.savez(folder / f"{part}.npz", images=pixels, labels=labels)
        header = struct.pack(">4B3I", 0, 0, 8, 3, *pixels.shape)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels.tobytes()))
        content = struct.pack(">4BI", 0, 0, 8, 1, len(labels)) + labels.astype(np.uint8).tobytes()
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
        for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            (folder / part / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / part / str(label) / f"{i:03}.png")
    return folder


def settings(folder: Path, name: str, train: str = "train.npz", valid: str = "valid.npz", **changes: Any) -> RunConfig:
    tables: dict[str, Any] = {
        "model": dict(MODEL),
        "task": {"kind": "image"},
        "data": {"train": str(folder / train), "valid": str(folder / valid)},
        "train": {"steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "run_dir": str(folder / name)},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "checkpoint": {"every": 2},
    }
    return run_config_from(changed(tables, changes))


def numbers(run_dir: Path) -> list[float]:
    lines = [dict(line) for line in losses(run_dir)]
    return [line["loss"] for line in lines] + [lines[-1]["valid_loss"], lines[-1]["valid_accuracy"]]


def test_every_layout_gives_the_same_numbers_and_a_cut_run_goes_on(folder: Path) -> None:
    run(1, settings(folder, "one"))
    expected = numbers(folder / "one")
    for ranks, changes in ((3, {}), (2, {"mesh_dp": 2}), (2, {"train_invariant": True})):
        run(ranks, settings(folder, "other", train_overwrite=True, **changes))
        np.testing.assert_allclose(numbers(folder / "other"), expected, rtol=1e-9)
    run(2, settings(folder, "cut", train_steps=2))
    run(3, settings(folder, "cut"), resume="auto")
    np.testing.assert_allclose(numbers(folder / "cut"), expected, rtol=1e-9)


def test_it_learns_and_classify_says_what_it_learnt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(1, settings(folder, "learnt", train_steps=60, model_dtype="float32", checkpoint_every=0))
    assert result.valid_accuracy is not None and result.valid_accuracy >= 0.95
    model = folder / "learnt" / "model"
    assert preprocessing_of(model, SIDE, 1) == Preprocessing.plain(SIDE, 1)
    capsys.readouterr()
    chosen = [next((folder / "valid" / label).iterdir()) for label in "01"]
    words = ["classify", "--model", str(model), *map(str, chosen), "--json", "--top", "1"]
    assert command_on_threads(3, *words) == [0, 0, 0]
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["classes"][0]["class"] for record in found] == ["0", "1"]
    assert command_on_threads(1, "classify", "--model", str(model), str(chosen[0])) == [0]
    assert capsys.readouterr().out.startswith(f"{chosen[0]}: 0 0.")


@pytest.mark.parametrize(("train", "valid"), [("train", "valid"), ("train-images-idx3-ubyte.gz",) * 2])
def test_all_forms_are_the_same_images(folder: Path, train: str, valid: str) -> None:
    found, expected = open_images(folder / train, 1), open_images(folder / "train.npz", 1)
    how = Preprocessing.plain(SIDE, 1)
    assert found.classes() == expected.classes() == ("0", "1")
    places = range(len(expected.labels))
    if train == "train":  # by class, then by name
        places = sorted(places, key=lambda i: (expected.labels[i], i))
    np.testing.assert_allclose(found.load(range(48), how, 1), expected.load(list(places), how, 1), atol=1e-6)
    assert [found.labels[i] for i in range(48)] == [expected.labels[i] for i in places]
    run(1, settings(folder, "form", train, valid, train_steps=1, train_overwrite=True))


def test_a_trunk_begins_other_classes(folder: Path) -> None:
    run(1, settings(folder, "trunk", train_steps=1))
    tables = {
        "model": {"from": str(folder / "trunk" / "model")},
        "task": {"kind": "image"},
        "data": {"train": str(folder / "train.npz"), "valid": str(folder / "valid.npz")},
        "train": {"steps": 1, "run_dir": str(folder / "goes-on")},
    }
    assert run(2, run_config_from(tables)).valid_accuracy is not None


@pytest.mark.parametrize(
    ("train", "changes", "words"),
    [
        ("missing.npz", {}, "missing.npz"),
        ("train-labels-idx1-ubyte.gz", {}, "no folder of images, no .npz and no IDX file"),
        ("train.npz", {"model_image_size": 9}, "has images of 8 x 8, the model takes 9 x 9"),
        ("train.npz", {"model_num_channels": 3}, "has images of 1 channels, the model takes 3"),
        ("train.npz", {"model_patch_size": 9}, "image_size=8 is smaller than patch_size=9"),
        ("train.npz", {"model_hidden_sizes": 9}, "unknown key 'hidden_sizes'"),
        ("train.npz", {"mesh_ep": 2}, "a model of type 'vit' has none"),
        ("learnt-not", {}, "learnt-not"),
    ],
)
def test_what_is_refused(folder: Path, train: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MpitpError, match=words):
        run(2, settings(folder, "refused", train, **changes))
    assert not (folder / "refused").exists()


def test_a_label_outside_the_classes_and_an_image_that_is_none(folder: Path, tmp_path: Path) -> None:
    pixels, labels = images(4, 3)
    np.savez(tmp_path / "valid.npz", images=pixels, labels=labels + 2)
    with pytest.raises(FileError, match="label '[23]' is none of the 2 classes"):
        run(1, settings(folder, "refused", valid=str(tmp_path / "valid.npz")))
    (tmp_path / "no.png").write_bytes(b"\x89PNG no image")
    with pytest.raises(FileError, match="no.png can't be read as an image: it has no form"):
        load_image(tmp_path / "no.png", Preprocessing.plain(8, 3), 3)
    np.savez(tmp_path / "floats.npz", images=pixels / 255, labels=labels)
    with pytest.raises(FileError, match=r"expected images \[n, h, w\] or \[n, h, w, c\] of bytes"):
        open_images(tmp_path / "floats.npz", 1)


def test_preprocessing_as_files_have_it(tmp_path: Path) -> None:
    dino = {
        "size": {"shortest_edge": 16}, "crop_size": {"height": 8, "width": 8}, "do_center_crop": True, "resample": 3,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    (tmp_path / PREPROCESSOR).write_text(json.dumps(dino))
    how = preprocessing_of(tmp_path, 8, 3)
    assert (how.resize, how.crop, how.resample, how.size) == ((16,), (8, 8), 3, (8, 8))
    Image.new("RGB", (40, 20), (255, 0, 51)).save(tmp_path / "a.png")
    found = load_image(tmp_path / "a.png", how, 3)
    assert found.shape == (3, 8, 8)
    np.testing.assert_allclose(found[:, 4, 4], [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225], rtol=1e-5)
    (tmp_path / PREPROCESSOR).write_text('{"image_mean": [0.5]}')
    with pytest.raises(FileError, match="must have 3 numbers"):
        preprocessing_of(tmp_path, 8, 3)


def test_unfolding_is_the_order_of_a_convolution() -> None:
    pixels = np.arange(2 * 3 * 5 * 5).reshape(2, 3, 5, 5)
    found = unfold(pixels, 2)
    assert found.shape == (8, 12)
    np.testing.assert_array_equal(found[5], pixels[1, :, 0:2, 2:4].reshape(-1))
