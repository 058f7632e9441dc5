"""Texts to token files: pieces give the tokens of the whole, files are published whole, bad texts are named."""

import json
import os
import pydoc_data.topics
import random

import numpy as np
import pytest

from mpitp.data import prepare as prepare_module
from mpitp.data.prepare import cut_text, prepare
from mpitp.data.token_file import TokenFile
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import FileError, UsageError
from tests.data.test_tokenizer import sentencepiece_like, trained

ENGLISH = "".join(pydoc_data.topics.topics.values())[:30_000]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(prepare_module, "PIECE_CHARACTERS", 101)
    monkeypatch.setattr(prepare_module, "READ_BYTES", 13)
    original = cut_text
    monkeypatch.setattr(prepare_module, "cut_text", lambda chunks: original(chunks, 101))


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def no_words():
    return "".join(random.Random(3).choices("中文字符", k=3000))


@pytest.mark.parametrize(
    "text", [ENGLISH, "é😀 " * 500, "a\n\n  b \n" * 300, no_words(), "x " + "y" * 1000], ids=range(5)
)
@pytest.mark.parametrize("kind", ["bytes", "trained", "sentencepiece"])
@pytest.mark.usefixtures("small_pieces")
def test_pieces_give_the_tokens_of_the_whole_text(kind, text, tmp_path):
    tokenizer = {
        "bytes": byte_tokenizer,
        "trained": lambda: trained(ENGLISH, 500),
        "sentencepiece": sentencepiece_like,
    }[kind]()
    prepare([write(tmp_path / "a.txt", text)], tokenizer, tmp_path / "out")
    tokens = TokenFile(tmp_path / "out")
    ids = tokens.read(0, len(tokens)).tolist()
    whole = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.eos_id is not None:
        assert ids.pop() == tokenizer.eos_id
    if " " in text:
        assert ids == whole
    assert tokenizer.decode(ids) == tokenizer.decode(whole) or kind == "sentencepiece"


def test_cutting_keeps_every_character_and_gives_the_context():
    chunks = [ENGLISH[i : i + 7] for i in range(0, 5000, 7)]
    pieces = list(cut_text(iter(chunks), 100))
    assert "".join(piece for _, piece in pieces) == "".join(chunks)
    assert all(len(piece) <= 100 for _, piece in pieces) and len(pieces) > 49
    so_far = ""
    for context, piece in pieces:
        assert so_far.endswith(context) and len(context) == min(16, len(so_far))
        so_far += piece


def test_documents_end_in_the_end_of_text(tmp_path):
    texts = [write(tmp_path / "a", "one"), write(tmp_path / "b", b"\xef\xbb\xbftwo")]
    read = []
    manifests = prepare(texts, byte_tokenizer(), tmp_path / "out", progress=read.append)
    tokens = TokenFile(tmp_path / "out")
    assert tokens.read(0, len(tokens)).tolist() == [*b"one", 256, *b"two", 256]
    assert manifests[""] == tokens.manifest
    assert tokens.manifest.num_documents == 2 and tokens.manifest.dtype == "uint16"
    assert sum(read) == 9
    tokens.check_sum()
    assert tokens.load_tokenizer().decode(tokens.read(0, 3)) == "one"


def test_held_out_tokens_are_the_last(tmp_path):
    text = write(tmp_path / "a", "0123456789" * 100)
    prepare([text], byte_tokenizer(), tmp_path / "out", valid_fraction=0.05)
    train, valid = TokenFile(tmp_path / "out" / "train"), TokenFile(tmp_path / "out" / "valid")
    assert (len(train), len(valid)) == (951, 50)
    both = np.concatenate([train.read(0, 951), valid.read(0, 50)])
    assert both.tolist() == [*text.read_bytes(), 256]
    train.check_sum()
    valid.check_sum()
    with pytest.raises(FileError, match="holds the parts train and valid: name one"):
        TokenFile(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"abc\xff", "not UTF-8: invalid start byte at byte 3 (0xff)"),
        (b"x" * 40 + b"\xe9t\xe9", "invalid continuation byte at byte 40 (0xe9)"),
        ("é".encode() * 30 + b"\xc3", "unexpected end of data at byte 60 (0xc3)"),
        (b"0123456789ab\xf0\x9f\x98z", "invalid continuation byte at byte 12 (0xf0)"),
        (b"", "holds no text (0 bytes)"),
        (b" \n\n", "holds no text (3 bytes)"),
    ],
)
@pytest.mark.usefixtures("small_pieces")
def test_bad_texts_are_named_and_leave_nothing(content, words, tmp_path):
    good, bad = write(tmp_path / "good", "fine"), write(tmp_path / "bad", content)
    with pytest.raises(FileError) as caught:
        prepare([good, bad], byte_tokenizer(), tmp_path / "out")
    assert words in str(caught.value) and str(bad) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "good"]


def test_other_mistakes(tmp_path):
    text, bytes_ = write(tmp_path / "a", "text"), byte_tokenizer()
    with pytest.raises(FileError, match="can't read .*none: No such file"):
        prepare([tmp_path / "none"], bytes_, tmp_path / "out")
    with pytest.raises(FileError, match="Is a directory"):
        prepare([tmp_path], bytes_, tmp_path / "out")
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="--valid-fraction"):
            prepare([text], bytes_, tmp_path / "out", valid_fraction=fraction)
    with pytest.raises(UsageError, match="leaves one part empty"):
        prepare([text], bytes_, tmp_path / "out", valid_fraction=0.01)
    with pytest.raises(FileError, match="can't create .*a/out: Not a directory"):
        prepare([text], bytes_, text / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_overwriting(tmp_path):
    text, out = write(tmp_path / "a", "text"), tmp_path / "out"
    prepare([text], byte_tokenizer(), out, valid_fraction=0.5)
    with pytest.raises(FileError, match="exists and is not empty"):
        prepare([text], byte_tokenizer(), out)
    prepare([text], byte_tokenizer(), out, overwrite=True)
    assert len(TokenFile(out)) == 5
    write(out / "book.txt", "do not lose me")
    with pytest.raises(FileError, match=r"holds book.txt"):
        prepare([text], byte_tokenizer(), out, overwrite=True)
    assert (out / "book.txt").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FileError, match="No space left on device"):
        prepare([write(tmp_path / "a", "text")], byte_tokenizer(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# Opening


@pytest.fixture
def prepared(tmp_path):
    prepare([write(tmp_path / "a", ENGLISH)], byte_tokenizer(), tmp_path / "out")
    return tmp_path / "out"


def change_manifest(directory, **changes):
    manifest = json.loads((directory / "manifest.json").read_text()) | changes
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_damaged_token_files(prepared):
    path = prepared / "tokens.bin"
    content = path.read_bytes()
    for damaged, words in (
        (content[:-1], "no whole number of uint16 tokens .* damaged"),
        (content[:-2], "truncated, or of another dtype"),
        (content[:-2] + b"\x01\x01", None),
        (np.frombuffer(content, np.uint16).astype(np.uint8).tobytes(), "or of another dtype"),
        (b"\xff\xff" + content[2:], "holds the token id 65535"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(FileError, match=words):
            tokens = TokenFile(prepared)
            tokens.read(len(tokens) - 4, 4)
            tokens.check_sum()
    path.unlink()
    with pytest.raises(FileError, match="No such file"):
        TokenFile(prepared)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "uint32"}, "no whole number of uint32 tokens|expected .* tokens of uint32"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": None}, "dtype is None"),
        ({"vocab_size": 70_000}, "vocab_size=70000 doesn't fit uint16"),
        ({"vocab_size": 50}, "holds the token id"),
        ({"num_tokens": -3}, "num_tokens is -3"),
        ({"num_tokens": True}, "num_tokens is True"),
        ({"format": "other"}, "format is 'other'"),
        ({"more": 1}, "missing or unknown: more"),
    ],
)
def test_manifests_that_do_not_fit(prepared, changes, words):
    change_manifest(prepared, **changes)
    with pytest.raises(FileError, match=words):
        TokenFile(prepared)


def test_what_is_no_prepared_data(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        TokenFile(tmp_path / "none")
    with pytest.raises(FileError, match=r"holds no manifest.json"):
        TokenFile(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(FileError, match="is not JSON"):
        TokenFile(tmp_path)


def test_a_tokenizer_that_was_exchanged(prepared):
    path = prepared / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(FileError, match="isn't the one"):
        TokenFile(prepared).load_tokenizer()


def test_large_vocabularies_take_four_bytes(tmp_path):
    from mpitp.data.token_file import TokenWriter, dtype_for

    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "uint32")
    with TokenWriter(tmp_path, 100_000) as writer:
        writer.append([99_999, 0])
        with pytest.raises(FileError, match="token id 100000 is outside the vocabulary"):
            writer.append([100_000])
    assert np.fromfile(tmp_path / "tokens.bin", "<u4").tolist() == [99_999, 0]
