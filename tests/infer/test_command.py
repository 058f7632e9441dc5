"""What `mpitp generate` says when standard output doesn't take its text."""

from __future__ import annotations

import argparse
import errno
import io
import json
import sys
from pathlib import Path

import pytest

from mpitp.cli import main
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import FileError
from mpitp.infer.command import Printer, _textless
from mpitp.infer.generate import Completion
from tests.command_on_threads import command_on_threads
from tests.data.test_tokenizer import sentencepiece_like
from tests.train.run_case import make_data, tables, write_run_file


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("stdout", "words"),
    [
        (None, "standard output: it is closed"),
        (FullDisk(), "standard output: No space left on device"),
        (io.TextIOWrapper(io.BytesIO(), encoding="ascii"), r"'\\u6f22' to standard output, whose encoding is ascii.*"),
    ],
    ids=["closed", "full", "ascii"],
)
def test_standard_output_that_takes_no_text(monkeypatch: pytest.MonkeyPatch, stdout: object, words: str) -> None:
    args = argparse.Namespace(json=False, no_echo=False, stream=False)
    printer = Printer(args, byte_tokenizer(), ["漢"], [[97]], is_speaker=True)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(FileError, match=f"can't write.*{words}"):
        printer.end([Completion([65], "length")])
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, "a b a b\n"),
        ({"stream": True}, "a b a b\n"),
        ({"no_echo": True}, " a b\n"),
        ({"json": True}, '{"prompt": "a b", "text": " a b", "tokens": TOKENS, "finish_reason": "length"}\n'),
    ],
)
def test_the_space_between_prompt_and_continuation_stays(
    capsys: pytest.CaptureFixture[str], options: dict[str, bool], printed: str
) -> None:
    args = argparse.Namespace(**({"json": False, "no_echo": False, "stream": False} | options))
    tokenizer = sentencepiece_like()
    prompt = tokenizer.encode("a b")
    new = tokenizer.encode("a b a b")[len(prompt) :]
    printer = Printer(args, tokenizer, ["a b"], [prompt], is_speaker=True)
    printer.begin()
    for token in new:
        printer.token(0, token)
    printer.end([Completion(new, "length")])
    assert capsys.readouterr().out == printed.replace("TOKENS", str(new))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_that_no_token_has_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    """A model of 1000 ids with a tokenizer of 257: text comes of few of them."""
    settings = tables(make_data(tmp_path), tmp_path / "run", train_steps=1, model_vocab_size=1000, train_eval_every=0)
    assert main(["train", str(write_run_file(tmp_path / "run.toml", settings))]) == 0
    words = ["generate", "--model", str(tmp_path / "run/model"), "--prompt", "To", "--max-new-tokens", "12", "--json"]
    capsys.readouterr()
    assert command_on_threads(ranks, *words, "--temperature", "5", "--ignore-eos") == [0] * ranks
    printed = capsys.readouterr()
    tokens = json.loads(printed.out)["tokens"]
    textless = [token for token in tokens if token > 256]
    assert len(tokens) == 12 and textless
    (line,) = [line for line in printed.err.splitlines() if "no token of the tokenizer" in line]
    assert line.startswith(f"mpitp: {len(textless)} of the 12 new tokens are ids that no token of the tokenizer has (")
    assert f"({', '.join(map(str, sorted(set(textless))[:5]))}" in line
    assert line.endswith("the model has a vocabulary of 1000, the tokenizer of 257")
    assert _textless(byte_tokenizer(), [0, 256, 97], 257) == []
