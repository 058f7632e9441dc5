"""`mpitp embed`: packed texts give what each gives alone, at every rank count; MiniLM's known cosines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint.encoder import load_trunk
from mpitp.cli import main
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.data.tokenizer import load_tokenizer
from mpitp.infer import embed as module
from mpitp.infer.embed import default_pool, embed, packs
from mpitp.layers.site import make_site
from tests.assets import fetch
from tests.command_on_threads import command_on_threads
from tests.models.encoder_files import make_encoder

TEXTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12], [250] * 24]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("embed") / "bert")


def vectors(group: Group, directory: Path, texts: list[list[int]], pool: str, normalize: bool) -> np.ndarray:
    return embed(load_trunk(directory, make_site(group, dtype="float64")), texts, pool, normalize=normalize)


@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_texts_give_what_each_gives_alone(
    directory: Path, ranks: int, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [vectors(SerialGroup(), directory, [text], pool, False)[0] for text in TEXTS]
    for most in (7, 2048):
        monkeypatch.setattr(module.packs, "__defaults__", (most,))
        for found in run_threads(ranks, vectors, directory, TEXTS, pool, False):
            np.testing.assert_allclose(found, alone, rtol=1e-12, atol=1e-13)
    unit = vectors(SerialGroup(), directory, TEXTS, pool, True)
    np.testing.assert_allclose(unit, alone / np.linalg.norm(alone, axis=1, keepdims=True), rtol=1e-12)


def test_the_mean_is_that_of_the_tokens_rows(directory: Path) -> None:
    from mpitp.models import Batch

    model = load_trunk(directory, make_site(SerialGroup(), dtype="float64"))
    hidden = model.hidden(Batch.of_lists(TEXTS[:3]))
    found = embed(model, TEXTS[:3])
    np.testing.assert_allclose(found, [hidden[:3].mean(0), hidden[3], hidden[4:].mean(0)], rtol=1e-12)


def test_packs_hold_every_text_once() -> None:
    lengths = [5, 1, 9, 30, 2, 2]
    found = list(packs(lengths, most=10))
    assert sorted(i for pack in found for i in pack) == list(range(6)) and found[0] == [3]
    assert all(len(pack) == 1 or sum(lengths[i] for i in pack) <= 10 for pack in found)


def test_the_command_prints_and_writes_the_same(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "texts").write_text("one text\nanother\n")
    assert command_on_threads(3, "embed", "--model", str(directory), "one text", "another", "--json") == [0, 0, 0]
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["text"] for record in records] == ["one text", "another"]
    out = tmp_path / "x.npy"
    assert main(["embed", "--model", str(directory), "--file", str(tmp_path / "texts"), "--out", str(out)]) == 0
    np.testing.assert_allclose(np.load(out), [record["embedding"] for record in records], atol=1e-5)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert main(["embed", "--model", str(directory), "one text"]) == 0
    printed = capsys.readouterr().out.splitlines()
    np.testing.assert_allclose([float(x) for x in printed[0].split()], records[0]["embedding"], atol=1e-5)


def test_a_long_text_is_cut_and_told(directory: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["embed", "--model", str(directory), "x" * 50, "x" * 24, "--json"]) == 0
    output = capsys.readouterr()
    assert "1 of 2 texts are longer than 24 tokens and were cut" in output.err
    first, second = (json.loads(line)["embedding"] for line in output.out.splitlines())
    np.testing.assert_allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "no text was given"),
        (["a", " "], 2, "text 2 is empty; every text needs some words"),
        (["a", "--file", "f"], 2, "not by both"),
        (["a", "--json", "--out", "x.npy"], 2, "choose one"),
        (["a", "--out", "missing/x.npy"], 4, "can't write"),
        (["--file", "missing.txt"], 4, "missing.txt"),
    ],
)
def test_what_is_refused(
    directory: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert set(command_on_threads(2, "embed", "--model", str(directory), *words)) == {code}
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_pooling_is_what_the_directory_says(tmp_path: Path) -> None:
    assert default_pool(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    assert default_pool(tmp_path) == "cls"
    config.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(Exception, match="asks for pooling_mode_max_tokens; supported are mean and cls"):
        default_pool(tmp_path)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_minilm_gives_its_known_cosines(ranks: int) -> None:
    """Those of its own documentation."""
    directory = fetch("minilm")
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    encoded = load_tokenizer(directory).encode_all(texts)

    def run(group: Group) -> np.ndarray:
        return embed(load_trunk(directory, make_site(group)), encoded, normalize=True)

    for found in run_threads(ranks, run):
        cosines = found @ found.T
        np.testing.assert_allclose(cosines[np.triu_indices(3, 1)], [0.6660, 0.1046, 0.1411], atol=1e-4)
