"""All text is read one way: UTF-8 with or without a mark; what else it is, is named with the cure."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.cli import main
from mpitp.data.prepare import prepare
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import ConfigError, FileError
from mpitp.files import read_json, write_json
from mpitp.run_file import load_run_config
from mpitp.text import check_encoding, decode_text, lines_of

LATIN, CYRILLIC, MIXED = "[data]\nseq_len = 16\n", "привет, мир\nпривет", "中文 characters\nof any kind\n"


@pytest.mark.parametrize(
    "text", [LATIN, CYRILLIC, MIXED, "", "a", "\ufeff", "a\x00b", "1\n2\n3\n4\n5\n6\n", "\t\t\n\t"]
)
def test_utf8_with_and_without_a_mark(text: str) -> None:
    assert decode_text(text.encode(), "f") == text.removeprefix("\ufeff")
    assert decode_text(b"\xef\xbb\xbf" + text.encode(), "f") == text


@pytest.mark.parametrize("text", [LATIN, CYRILLIC, MIXED])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_wide_encodings_are_named(text: str, encoding: str, mark: str) -> None:
    if text == MIXED and "16" in encoding and not mark:
        text *= 5
    with pytest.raises(FileError, match=f"f is UTF-{encoding[4:6]}.* text, expected UTF-8; convert it: iconv -f UTF-"):
        decode_text((mark + text).encode(encoding), "f")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"text", mtime=0), r"compressed \(gzip\), expected plain text; unpack it: gunzip -c f > NEW"),
        (lzma.compress(b"text"), r"compressed \(xz\)"),
        (b"PK\x03\x04text", r"compressed \(zip\)"),
        (b"caf\xe9 ", "f is not UTF-8: invalid continuation byte at byte 3"),
    ],
)
def test_what_is_no_text(content: bytes, words: str) -> None:
    with pytest.raises(FileError, match=words):
        decode_text(content, "f")


def test_real_text_is_never_taken_for_a_wide_encoding() -> None:
    for path in sorted((Path(__file__).parent.parent / "mpitp").rglob("*.py")):
        check_encoding(path.read_bytes()[:4096], path)


def test_lines_are_cut_at_line_feeds_alone() -> None:
    inside = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]
    assert lines_of("".join(f"a{c}b\n" for c in inside)) == [f"a{c}b" for c in inside]
    assert lines_of("one\r\ntwo\n\nlast") == ["one", "two", "", "last"]
    assert lines_of("") == [] and lines_of("\n") == [""]


# Every reader of text reads it this way


RUN = """
[model]
model_type = "llama"
hidden_size = 8
num_attention_heads = 2
num_hidden_layers = 1
intermediate_size = 8
max_position_embeddings = 32
[data]
train = "{data}"
seq_len = 8
[train]
steps = 1
run_dir = "{run}"
"""


def test_a_run_file(tmp_path: Path) -> None:
    path, text = tmp_path / "run.toml", RUN.format(data="d", run="r")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_run_config(path).data.seq_len == 8
    for content, words in (
        (text.encode("utf-16"), "is UTF-16 text"),
        (text.encode("utf-16-le"), "is UTF-16LE text"),
        (gzip.compress(text.encode()), "is compressed"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            load_run_config(path)


def test_json_files(tmp_path: Path) -> None:
    path, text = tmp_path / "config.json", json.dumps({"a": "é"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_json(path) == {"a": "é"}
    for content, words in ((text.encode("utf-16"), "is UTF-16 text"), (gzip.compress(text.encode()), "is compressed")):
        path.write_bytes(content)
        with pytest.raises(FileError, match=words):
            read_json(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_files(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tok").mkdir()
    for file, content in byte_tokenizer().files.items():
        (tmp_path / "tok" / file).write_bytes(content)
    (tmp_path / "text").write_text("hello")
    content = (tmp_path / "tok" / name).read_bytes()
    words = ["data", "prepare", f"{tmp_path}/text", "--tokenizer", f"{tmp_path}/tok", "--out", f"{tmp_path}/out"]
    (tmp_path / "tok" / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert main(words) == 0
    (tmp_path / "tok" / name).write_bytes(content.decode().encode("utf-16"))
    assert main(words) == 4
    assert f"{name} is UTF-16 text" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "gzip"])
def test_texts(tmp_path: Path, encoding: str) -> None:
    text = "hello, world\n" * 1000
    content = gzip.compress(text.encode()) if encoding == "gzip" else text.encode(encoding)
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(FileError, match="text is (compressed|UTF-16)"):
        prepare([tmp_path / "text"], byte_tokenizer(), tmp_path / "out")


# Names that are no text, terminals that lack letters, the locale C


def test_names_that_are_no_text_are_written_and_read_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "a.json", {"name": name})
    assert (tmp_path / "a.json").read_text() == '{\n  "name": "caf\\udce9"\n}\n'
    assert read_json(tmp_path / "a.json") == {"name": name}


def run(words: list[bytes | str], folder: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mpitp", *words]
    environ = {**os.environ, "PYTHONWARNINGS": "error", **environ}
    return subprocess.run(command, cwd=folder, capture_output=True, env=environ, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model trained to say what an ASCII terminal lacks."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text").write_text("é漢😀 " * 200)
    (folder / "run.toml").write_text(
        RUN.format(data="d", run="läuf")
        .replace("steps = 1", "steps = 60\nmicro_batch_size = 8")
        .replace("size = 8", "size = 32", 1)
        + "[optim]\nlr = 1e-2"
    )
    for words in (["data", "prepare", "text", "--tokenizer", "bytes", "--out", "d"], ["train", "run.toml"]):
        done = run(words, folder, LC_ALL="C")
        assert done.returncode == 0, done.stderr
    assert (folder / "läuf" / "model").is_dir()
    return folder


GENERATE: list[bytes | str] = ["generate", "--model", "läuf/model", "--prompt", "é漢", "--max-new-tokens", "5"]


@pytest.mark.parametrize(
    ("environ", "printed"),
    [
        ({"LC_ALL": "C"}, "é漢😀 \n".encode()),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"\\xe9\\u6f22\\U0001f600 \n"),
        ({"PYTHONIOENCODING": "ascii"}, b"\\xe9\\u6f22\\U0001f600 \n"),
        ({"PYTHONIOENCODING": "latin-1"}, b"\xe9\\u6f22\\U0001f600 \n"),
    ],
)
def test_letters_that_a_terminal_lacks_are_escaped(model: Path, environ: dict[str, str], printed: bytes) -> None:
    for extra in ([], ["--stream"]):
        done = run([*GENERATE, *extra], model, **environ)
        assert (done.returncode, done.stdout) == (0, printed), done.stderr
    done = run([*GENERATE, "--json"], model, **environ)
    assert json.loads(done.stdout.decode("latin-1" if "latin" in str(environ) else "utf-8"))["text"] == "😀 "


def test_training_under_an_ascii_locale_finds_its_accented_folder(model: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(["train", "run.toml", "--set", "train.run_dir=zwölf", "--set", "train.steps=1"], model, **plain)
    assert done.returncode == 0 and "zwölf/model".encode() in done.stdout, done.stderr
    assert (model / "zwölf" / "model").is_dir()
    done = run(["train", "run.toml"], model, **plain)
    assert done.returncode == 4 and b"Traceback" not in done.stderr and b"l\\xe4uf holds" in done.stderr


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))).write_text("hello " * 9)
    words: list[bytes | str] = ["data", "prepare", b"caf\xe9", "--tokenizer", "bytes", "--out", b"d\xff"]
    done = run(words, tmp_path, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0 and b"d\\xff: 55 tokens" in done.stdout, done.stderr
    shown = run(["data", "show", b"d\xff"], tmp_path)
    assert shown.returncode == 0 and b'"caf\\udce9"' in shown.stdout, shown.stderr
    missing = run(["data", "show", b"none\xff"], tmp_path)
    assert missing.returncode == 4 and b"prepared data none\\xff does not exist" in missing.stderr


def test_prompts_of_a_file(model: Path) -> None:
    (model / "prompts").write_bytes("\ufeffé漢\u2028\r\né\x0c漢\n".encode())
    done = run(["generate", "--model", "läuf/model", "--prompts", "prompts", "--json", "--max-new-tokens", "1"], model)
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["é漢\u2028", "é\x0c漢"]
    (model / "prompts").write_bytes("one\ntwo\n".encode("utf-16"))
    done = run(["generate", "--model", "läuf/model", "--prompts", "prompts"], model)
    assert done.returncode == 4 and b"prompts is UTF-16 text, expected UTF-8; convert it: iconv" in done.stderr
