"""Held-out scores of models that don't continue text are those of the run that made them, on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mpitp.cli import main
from mpitp.config import RunConfig
from mpitp.train.run import RunResult
from tests.command_on_threads import command_on_threads
from tests.parity.encoder_decoder_case import PAIRS
from tests.train import test_encoder_tasks, test_image_task, test_pair_task, test_tokens_task
from tests.train.run_case import run
from tests.train.test_encoder_tasks import folder as of_encoders  # noqa: F401 (a fixture)
from tests.train.test_image_task import folder as of_images  # noqa: F401
from tests.train.test_pair_task import folder as of_pairs  # noqa: F401
from tests.train.test_tokens_task import folder as of_words  # noqa: F401

Case = tuple[Path, RunConfig]
PARITY = PAIRS.parent


def case_of(what: str, request: pytest.FixtureRequest) -> Case:
    """The held-out data of a kind, and a run of one step that measures them."""
    one: dict[str, Any] = {"train_steps": 1, "model_dtype": "float64"}
    if what == "pairs":
        folder: Path = request.getfixturevalue("of_pairs")
        return folder / "valid.tsv", test_pair_task.settings(folder, "t5", "eval", **one)
    if what == "words":
        folder = request.getfixturevalue("of_words")
        return folder / "valid.tsv", test_tokens_task.settings(folder, "eval", **one)
    if what == "images":
        folder = request.getfixturevalue("of_images")
        return folder / "valid.npz", test_image_task.settings(folder, "eval", **one)
    folder = request.getfixturevalue("of_encoders")
    kind = {"labels": "classification", "masked": "masked"}[what]
    data = folder / ("data/valid" if what == "masked" else "valid.tsv")
    return data, test_encoder_tasks.settings(folder, kind, f"eval-{what}", data_valid_sequences=0, **one)


@pytest.mark.parametrize("what", ["pairs", "labels", "words", "masked", "images"])
def test_scores_are_those_of_the_run(
    what: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    data, settings = case_of(what, request)
    expected: RunResult = run(1, settings)
    seq_len = [] if what == "images" else ["--seq-len", str(settings.data.seq_len)]
    words = ["--model", str(expected.model_directory), *seq_len, "--seed", str(settings.train.seed)]
    capsys.readouterr()
    for ranks in (1, 3):
        call = ["eval", what, str(data), *words, "--dtype", "float64", "--batch", "4", "--json"]
        assert command_on_threads(ranks, *call) == [0] * ranks
        found = json.loads(capsys.readouterr().out)
        assert found["loss"] == pytest.approx(expected.valid_loss, rel=1e-6)  # the directory holds 32 bits
        assert (found["accuracy"], found.get("exact")) == (expected.valid_accuracy, expected.valid_exact)
        assert found.get("f1") == expected.valid_f1
        assert found["targets"] > 0
    assert main(["eval", what, str(data), *words]) == 0
    assert capsys.readouterr().out.startswith(f"accuracy {expected.valid_accuracy:.4f} over ")


@pytest.mark.parametrize(
    ("what", "directory", "said"),
    [
        (
            "pairs",
            "golden_encoders/bert-masked",
            "isn't an encoder with a decoder; measure it with mpitp eval labels, words, masked",
        ),
        ("labels", "golden_encoder_decoders/t5", "isn't an encoder; measure it with mpitp eval pairs"),
        ("labels", "golden_encoders/bert-masked", "no head for classification: its architecture says 'masked'"),
        ("masked", "golden_vision/vit", "isn't an encoder; measure it with mpitp eval images"),
        ("images", "golden/gpt2", "isn't a vision transformer; measure it with mpitp eval perplexity"),
        ("perplexity", "golden_encoder_decoders/bart", "mpitp generate, eval pairs"),
        ("perplexity", "golden_encoders/bert-masked", "eval labels, words or masked"),
        ("perplexity", "golden_vision/vit", "mpitp classify, eval images"),
    ],
)
def test_another_kind_of_model_is_told_what_measures_it(
    what: str, directory: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").write_text("a\tb\n")
    assert main(["eval", what, str(tmp_path / "data"), "--model", str(PARITY / directory)]) == 3
    assert said in capsys.readouterr().err


def test_classes_of_another_name_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, settings = case_of("labels", request)
    model = run(
        1, dataclasses.replace(settings, train=dataclasses.replace(settings.train, run_dir=str(tmp_path / "run")))
    )
    words = ["--model", str(model.model_directory)]
    (tmp_path / "data").write_text("good\tx\nugly\tx\n")
    assert main(["eval", "labels", str(tmp_path / "data"), *words]) == 4
    assert "label 'ugly' is none of the 2 classes" in capsys.readouterr().err
    config = model.model_directory / "config.json"
    config.write_text(config.read_text().replace('"bad"', '"LABEL_0"').replace('"good"', '"LABEL_1"'))
    assert main(["eval", "labels", str(data), *words]) == 3
    assert "has the classes LABEL_0, LABEL_1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "directory", "said"),
    [
        (["embed", "a"], "golden_encoder_decoders/t5", "an encoder with a decoder: mpitp generate, eval"),
        (["embed", "a"], "golden_vision/vit", "a vision transformer: mpitp classify, eval"),
        (["classify", "a.png"], "golden_encoder_decoders/bart", "an encoder with a decoder: mpitp generate, eval"),
        (
            ["classify", "a"],
            "golden/gpt2",
            "has no classes; expected an encoder (bert, roberta, distilbert) or a vision",
        ),
        (["generate", "--prompt", "a"], "golden_vision/vit", "mpitp classify, eval images"),
    ],
)
def test_other_verbs_say_what_takes_such_a_model(
    words: list[str], directory: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--model", str(PARITY / directory)]) == 3
    assert said in capsys.readouterr().err
