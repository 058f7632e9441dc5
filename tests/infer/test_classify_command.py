"""`mpitp classify` and `embed` say what they take, where they are given the other thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitp.cli import main
from tests.command_on_threads import command_on_threads
from tests.models.encoder_files import make_encoder
from tests.parity.encoder_decoder_case import PAIRS

VIT = PAIRS.parent / "golden_vision" / "vit"


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A BERT with classes of texts."""
    return make_encoder(tmp_path / "bert", architectures=["BertForSequenceClassification"])


@pytest.mark.parametrize("verb", ["classify", "embed"])
def test_an_image_is_no_text(
    verb: str, classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([verb, "--model", str(classifier), "seven.png"]) == 0, "a text, as long as there is no such file"
    Path("seven.png").write_bytes(b"\x89PNG")
    capsys.readouterr()
    assert main([verb, "--model", str(classifier), "a text", "seven.png"]) == 2
    captured = capsys.readouterr()
    assert "seven.png is an image file, and this model reads texts; images go to mpitp classify" in captured.err
    assert not captured.out
    assert command_on_threads(2, verb, "--model", str(classifier), "a text", "seven.png") == [2, 2]


def test_a_text_is_no_image(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image")
    assert main(["classify", "--model", str(VIT), "what a day"]) == 4
    captured = capsys.readouterr()
    assert (
        f"can't read what a day: no such file, and {VIT} is a model of images; texts go to an encoder" in captured.err
    )
    assert not captured.out
