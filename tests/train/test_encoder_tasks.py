"""Training of encoders: classes of labelled texts and hidden tokens, alike in every layout, resumed, and refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.encoder import load_encoder_config
from mpitp.config import RunConfig, run_config_from
from mpitp.data.labelled import read_labelled
from mpitp.data.masking import Masking
from mpitp.errors import ConfigError, FileError, MpitpError
from tests.models.encoder_files import TINY_BERT, make_encoder
from tests.train.kinds_case import prepare_for_masking
from tests.train.run_case import changed, losses, numbers, run

MODEL = {key: value for key, value in TINY_BERT.items() if key not in ("vocab_size", "architectures")}
GOOD, BAD = ("good", "great", "fine"), ("bad", "awful", "poor")
ALIKE = 1e-9  # float64 over other sums


def labelled(count: int, seed: int) -> str:
    """Lines that a word decides."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        kind = int(rng.integers(2))
        lines.append(f"{('bad', 'good')[kind]}\t{'x' * int(rng.integers(1, 4))} {rng.choice((BAD, GOOD)[kind])}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled texts, prepared text with a mask token, and a tiny BERT."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "train.tsv").write_text(labelled(60, 1))
    (folder / "valid.tsv").write_text(labelled(21, 2))
    prepare_for_masking(folder, "abcabcabc" * 100)
    make_encoder(folder / "bert")
    return folder


def settings(folder: Path, kind: str, name: str, **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "train": str(folder / "train.tsv"),
        "valid": str(folder / "valid.tsv"),
        "tokenizer": "bytes",
    }
    if kind == "masked":
        data = {"train": str(folder / "data/train"), "valid": str(folder / "data/valid"), "valid_sequences": 5}
    tables: dict[str, Any] = {
        "model": {**MODEL, "dtype": "float64"},
        "task": {"kind": kind},
        "data": {**data, "seq_len": 16},
        "train": {"steps": 4, "global_batch_size": 6, "micro_batch_size": 3, "run_dir": str(folder / name)},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "checkpoint": {"every": 2},
    }
    return run_config_from(changed(tables, changes))


HELD_OUT = ("valid_loss", "valid_accuracy")


@cache
def one_rank(folder: Path, kind: str) -> np.ndarray:
    run(1, settings(folder, kind, f"{kind}-one"))
    return numbers(folder / f"{kind}-one", *HELD_OUT)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(3, {}), (2, {"mesh_dp": 2}), (1, {"train_micro_batch_size": 2}), (2, {"train_invariant": True})],
    ids=["tp 3", "dp 2", "smaller microbatches", "invariant"],
)
@pytest.mark.parametrize("kind", ["classification", "masked"])
def test_every_layout_gives_the_same_numbers(folder: Path, kind: str, ranks: int, changes: dict[str, Any]) -> None:
    name = f"{kind}-{ranks}-{len(changes)}{next(iter(changes), '')}"
    run(ranks, settings(folder, kind, name, **changes))
    np.testing.assert_allclose(numbers(folder / name, *HELD_OUT), one_rank(folder, kind), rtol=ALIKE, atol=ALIKE)


@pytest.mark.parametrize("kind", ["classification", "masked"])
def test_a_run_that_was_cut_goes_on_to_the_same_numbers(folder: Path, kind: str) -> None:
    one_rank(folder, kind)
    name = f"{kind}-cut"
    run(1, settings(folder, kind, name, train_steps=2))
    run(1, settings(folder, kind, name), resume="auto")
    found = [dict(line) for line in losses(folder / name)]
    expected = [dict(line) for line in losses(folder / f"{kind}-one")]
    assert [line["loss"] for line in found] == [line["loss"] for line in expected]
    assert found[-1]["valid_loss"] == expected[-1]["valid_loss"]


def test_a_classifier_learns_and_names_its_classes(folder: Path) -> None:
    result = run(2, settings(folder, "classification", "learnt", train_steps=40, model_dtype="float32"))
    assert result.valid_accuracy == 1.0
    config = load_encoder_config(folder / "learnt" / "model")
    assert (config.head, config.labels) == ("classification", ("bad", "good"))
    assert json.loads((folder / "learnt/model/config.json").read_text())["label2id"] == {"bad": 0, "good": 1}
    again = settings(folder, "classification", "again", train_steps=1, optim_lr=1e-9)
    again = run_config_from({
        "model": {"from": str(folder / "learnt/model")},
        "task": {"kind": "classification"},
        "data": {"train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv"), "seq_len": 16},
        "train": {"steps": 1, "run_dir": str(folder / "again")},
        "optim": {"lr": 1e-9},
    })  # fmt: skip
    assert run(1, again).valid_accuracy == 1.0


def test_a_trunk_from_a_directory_begins_a_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"model": {"from": str(folder / "bert")}, "optim": {"lr": 1e-3}}
    tables = {
        "task": {"kind": "classification"},
        "data": {"train": str(folder / "train.tsv"), "seq_len": 4},
        "train": {"steps": 1, "run_dir": str(folder / "fine")},
    }
    run(2, run_config_from({**tables, **changes}))
    told = capsys.readouterr().err
    assert "has no such head: what it lacks of one begins from train.seed" in told
    assert "60 of 60 texts have data.seq_len=4 tokens or more" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("good\tfine\nnice\tfine\n", "valid.tsv, line 2: label 'nice' is none of the 2 classes (bad, good)"),
        ("good\t \n", "valid.tsv, line 1: the text is empty"),
        ("\tfine\n", "line 1: the label is empty"),
        ("good fine\n", "line 1: expected label TAB text"),
        ('{"label": "good"}\n', 'expected a JSON object with "label" and "text"'),
        ('{"label": \n', "line 1 is not JSON"),
        ("\n", "holds no labelled text"),
    ],
)
def test_labelled_texts_that_are_refused(folder: Path, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "valid.tsv").write_text(content)
    changed = settings(folder, "classification", "refused", data_valid=str(tmp_path / "valid.tsv"))
    with pytest.raises(FileError) as caught:
        run(3, changed)
    assert words in str(caught.value)
    assert not (folder / "refused").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("classification", {"data_tokenizer": None}, "labelled texts need a tokenizer"),
        ("classification", {"data_seq_len": 25}, "data.seq_len=25 exceeds the model's 24 positions"),
        ("classification", {"mesh_pp": 2, "train_micro_batch_size": 6}, "but mesh.pp = 2 stages need at least 2"),
        ("classification", {"mesh_pp": 2, "mesh_schedule": "interleaved"}, "= 4 parts of at least one block each, but"),
        ("classification", {"mesh_cp": 2, "data_seq_len": 3}, "cuts each sequence into 2 . 2 = 4 pieces"),
        ("classification", {"mesh_ep": 2}, "a model of type 'bert' has none; give the ranks to mesh.dp"),
        ("classification", {"model_hidden_sizes": 3}, "unknown key 'hidden_sizes'.*did you mean 'hidden_size'"),
        ("masked", {"task_mask_rate": 1.0}, "task.mask_rate = 1.0: expected a finite number above 0 and below 1"),
        ("maskd", {}, 'expected a string out of "text", "masked", "classification"'),
    ],
)
def test_run_files_that_are_refused(folder: Path, kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MpitpError, match=words):
        run(2, settings(folder, kind, "refused", **changes))
    assert not (folder / "refused").exists()


def test_one_label_is_no_choice(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a\tb\n")
    with pytest.raises(ConfigError, match="has the one label 'a'"):
        run(1, settings(folder, "classification", "refused", data_train=str(tmp_path / "one")))


def test_json_lines_say_the_same_as_tabs(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\tsome text\n\n1\tmore\twith a tab\n")
    (tmp_path / "b").write_text('{"label": "x", "text": "some text"}\n\n{"label": 1, "text": "more\\twith a tab"}\n')
    a, b = read_labelled(tmp_path / "a"), read_labelled(tmp_path / "b")
    assert (a.labels, a.texts, a.numbers) == (b.labels, b.texts, b.numbers) == (
        ("x", "1"), ("some text", "more\twith a tab"), (1, 3)
    )  # fmt: skip


def test_masking_depends_on_seed_sample_and_place_alone() -> None:
    masking = Masking(0.15, 4, 1000, (0, 1), seed=3)
    tokens = np.random.default_rng(0).integers(0, 1000, (200, 200))
    seen, targets = masking.apply(tokens, range(200))
    chosen = targets >= 0
    part, part_targets = masking.apply(tokens[[150, 7]], [150, 7])
    np.testing.assert_array_equal(part, seen[[150, 7]])
    np.testing.assert_array_equal(part_targets, targets[[150, 7]])
    np.testing.assert_array_equal(targets[chosen], tokens[chosen])
    np.testing.assert_array_equal(seen[~chosen], tokens[~chosen])
    assert not np.isin(tokens[chosen], (0, 1)).any()
    assert abs(chosen.mean() - 0.15) < 0.005
    assert abs((seen[chosen] == 4).mean() - 0.8) < 0.02 and abs((seen[chosen] == targets[chosen]).mean() - 0.1) < 0.02
    assert (masking.apply(tokens, range(200, 400))[1] != targets).any()
