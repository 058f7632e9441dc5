"""`mpitp data` as a user runs it."""

import json
import os
import threading

import pytest

from mpitp.cli import main

TEXT = "It was a dark and stormy night. " * 20


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "night.txt"
    path.write_text(TEXT)
    return path


def test_prepare_and_show(text, tmp_path, capsys):
    out = tmp_path / "data"
    assert (
        main(["data", "prepare", str(text), "--tokenizer", "bytes", "--out", str(out), "--valid-fraction", "0.1"]) == 0
    )
    printed = capsys.readouterr()
    assert f"{out}/train: 577 tokens (uint16), vocabulary of 257" in printed.out and "tokenizing" in printed.err
    assert main(["data", "show", str(out / "train"), "--tokens", "8", "--check"]) == 0
    shown = capsys.readouterr().out
    manifest, end = json.JSONDecoder().raw_decode(shown)
    assert manifest["num_tokens"] == 577 and manifest["sources"] == [str(text)]
    assert shown[end:].strip() == "It was a"


def test_special_tokens_in_a_text_are_told(tmp_path, capsys):
    (tmp_path / "a").write_text("one<|endoftext|>two")
    words = ["data", "prepare", str(tmp_path / "a"), "--tokenizer", "bytes", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "spell special tokens" in printed.err and "<|endoftext|> (1)" in printed.err
    assert f"{tmp_path}/out: 8 tokens" in printed.out
    assert main([*words, str(tmp_path / "plain"), "--plain-specials"]) == 0
    printed = capsys.readouterr()
    assert "spell" not in printed.err and f"{tmp_path}/plain: 20 tokens" in printed.out


@pytest.mark.parametrize("bad", ["none", "empty", "folder", "latin1", "spaces"])
@pytest.mark.parametrize("options", [(), ("--valid-fraction", "3")])
def test_errors_come_before_any_progress(text, tmp_path, capsys, bad, options):
    for name, content in (("empty", b""), ("latin1", b"caf\xe9"), ("spaces", b" ")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    texts = [str(text)] if options else [str(tmp_path / bad)]
    assert main(["data", "prepare", *texts, "--tokenizer", "bytes", "--out", str(tmp_path / "out"), *options]) in (2, 4)
    printed = capsys.readouterr()
    assert printed.err.startswith(("FileError: ", "UsageError: ")) and printed.out == ""


def test_missing_second_text_is_found_first(text, tmp_path, capsys):
    words = ["data", "prepare", str(text), str(tmp_path / "none"), "--tokenizer", "bytes", "--out", str(tmp_path / "o")]
    assert main(words) == 4
    assert capsys.readouterr().err.startswith("FileError: can't read ")


def test_existing_output_is_refused_without_progress(text, tmp_path, capsys):
    words = ["data", "prepare", str(text), "--tokenizer", "bytes", "--out", str(tmp_path)]
    assert main(words) == 4
    assert capsys.readouterr().err.startswith("FileError: ")


def test_text_from_a_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(TEXT))
    writer.start()
    words = ["data", "prepare", str(tmp_path / "pipe"), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    writer.join()
    assert "641 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["prepare", "{text}", "--tokenizer", "none", "--out", "{out}"], 4, "tokenizer directory none does not exist"),
        (["prepare", "{dir}/none", "--tokenizer", "bytes", "--out", "{out}"], 4, "No such file"),
        (
            ["prepare", "{text}", "--tokenizer", "bytes", "--out", "{out}", "--valid-fraction", "2"],
            2,
            "--valid-fraction 2.0",
        ),
        (["prepare", "{text}", "--tokenizer", "bytes"], 2, "--out"),
        (["prepare", "{text}", "--tokenizer", "bytes", "--out", "{text}/x"], 4, "Not a directory"),
        (["show", "{dir}"], 4, "holds no manifest.json"),
        (["show", "{dir}", "--tokens", "-1"], 2, "--tokens -1"),
    ],
)
def test_mistakes_are_one_message(arguments, code, words, text, tmp_path, capsys):
    filled = [a.format(text=text, out=tmp_path / "out", dir=tmp_path) for a in arguments]
    assert main(["data", *filled]) == code
    printed = capsys.readouterr()
    assert words in printed.err and "Traceback" not in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["night.txt"]
