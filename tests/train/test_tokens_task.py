"""Training of an encoder that gives each word a class, alike in every layout; `mpitp classify` with what it learnt."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.encoder import load_encoder_config
from mpitp.config import RunConfig, run_config_from
from mpitp.errors import ConfigError, FileError
from tests.command_on_threads import command_on_threads
from tests.models.encoder_files import TINY_BERT, make_encoder
from tests.train.run_case import changed, numbers, run

MODEL = {key: value for key, value in TINY_BERT.items() if key not in ("vocab_size", "architectures")}
LENGTH = 24


LABELS = {"a": "O", "B": "B-P", "C": "I-P"}


def sentences(count: int, seed: int) -> str:
    """Lines whose first letter decides."""
    rng, lines = np.random.default_rng(seed), []
    for _ in range(count):
        letters = rng.choice(list(LABELS), int(rng.integers(1, 6)))
        lines += [*(f"{letter}x\t{LABELS[letter]}" for letter in letters), ""]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    (folder / "train.tsv").write_text(sentences(80, 1))
    (folder / "valid.tsv").write_text(sentences(21, 2))
    return folder


def settings(folder: Path, name: str, **changes: Any) -> RunConfig:
    tables: dict[str, Any] = {
        "model": {**MODEL, "dtype": "float64"},
        "task": {"kind": "token-classification"},
        "data": {
            **{"train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv")},
            **{"tokenizer": "bytes", "seq_len": LENGTH},
        },
        "train": {"steps": 4, "global_batch_size": 6, "micro_batch_size": 3, "run_dir": str(folder / name)},
        "optim": {"lr": 1e-2, "schedule": "constant"},
    }
    return run_config_from(changed(tables, changes))


HELD_OUT = ("valid_loss", "valid_accuracy", "valid_f1")


@cache
def one_rank(folder: Path) -> np.ndarray:
    run(1, settings(folder, "one"))
    return numbers(folder / "one", *HELD_OUT)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(3, {}), (2, {"mesh_dp": 2}), (2, {"mesh_pp": 2}), (2, {"train_invariant": True})],
    ids=["tp 3", "dp 2", "pp 2", "invariant"],
)
def test_every_layout_gives_the_same_numbers(folder: Path, ranks: int, changes: dict[str, Any]) -> None:
    name = f"{ranks}-{next(iter(changes), '')}"
    run(ranks, settings(folder, name, **changes))
    np.testing.assert_allclose(numbers(folder / name, *HELD_OUT), one_rank(folder), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def learnt(folder: Path) -> Path:
    """A model that has learnt them, on two ranks."""
    result = run(2, settings(folder, "learnt", train_steps=30, model_dtype="float32", train_micro_batch_size=6))
    assert result.valid_f1 is not None and result.valid_accuracy is not None
    assert result.valid_f1 >= 0.95 and result.valid_accuracy >= 0.95
    return folder / "learnt" / "model"


def test_it_names_its_classes_and_classify_says_them(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_encoder_config(learnt)
    assert (config.head, config.labels) == ("tokens", ("B-P", "I-P", "O"))
    capsys.readouterr()
    for ranks in (1, 3):
        assert command_on_threads(ranks, "classify", "--model", str(learnt), "Bx Cx ax", "ax Bx") == [0] * ranks
        assert capsys.readouterr().out == "Bx\tB-P\nCx\tI-P\nax\tO\n\nax\tO\nBx\tB-P\n\n"
    assert command_on_threads(1, "classify", "--model", str(learnt), "Bx " * 10, "--json") == [0]
    told = capsys.readouterr()
    words = json.loads(told.out)["words"]
    assert [word["label"] for word in words] == ["B-P"] * 8 + [None] * 2
    assert 0.5 < words[0]["probability"] <= 1
    assert "1 of 1 texts are longer than 24 tokens and were cut" in told.err


def test_classify_tells_classes_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    make_encoder(tmp_path / "bert", architectures=["BertForSequenceClassification"], **labels)
    (tmp_path / "texts").write_text("some words\na\n")
    words = ["classify", "--model", str(tmp_path / "bert"), "--file", str(tmp_path / "texts")]
    outputs = []
    for ranks in (1, 2):
        assert command_on_threads(ranks, *words, "--dtype", "float64") == [0] * ranks
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert [line.partition(": ")[0] for line in outputs[0].splitlines()] == ["some words", "a"]
    assert command_on_threads(1, *words, "--json", "--top", "1") == [0]
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["text"] == "some words" and first["classes"][0]["class"] in ("bad", "good")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bert", "a"), "has no classes; mpitp train with [task] kind"),
        (("bert", " "), "text 1 is empty"),
        (("bert",), "nothing to classify was given"),
        (("bert", "a", "--file", "f"), "give texts as words or by --file, not by both"),
    ],
)
def test_classify_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Any, said: str) -> None:
    make_encoder(tmp_path / "bert")
    assert 0 not in command_on_threads(1, "classify", "--model", str(tmp_path / words[0]), *words[1:])
    told = capsys.readouterr()
    assert told.err.count(said) == 1 and not told.out


def test_what_is_refused_writes_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "valid.tsv").write_text("Ax\tB-P\nbx\tQ\n")
    with pytest.raises(FileError, match=r"line 2: label 'Q' is none of the 3 classes \(B-P, I-P, O\)"):
        run(3, settings(folder, "refused", data_valid=str(tmp_path / "valid.tsv")))
    (tmp_path / "one").write_text("a\tO\n")
    with pytest.raises(ConfigError, match="has the one label 'O'"):
        run(1, settings(folder, "refused", data_train=str(tmp_path / "one")))
    assert not (folder / "refused").exists()
