"""Texts to token files: pieces give the tokens of the whole, files are published whole, bad texts are named."""

import json
import os
import pydoc_data.topics
import random

import numpy as np
import pytest
import tokenizers

from mpitp.data import pieces as pieces_module
from mpitp.data import prepare as prepare_module
from mpitp.data.pieces import windows
from mpitp.data.prepare import Specials, prepare
from mpitp.data.token_file import TokenFile
from mpitp.data.tokenizer import Tokenizer, byte_tokenizer
from mpitp.errors import FileError, UsageError
from tests.data.test_tokenizer import sentencepiece_like, trained

ENGLISH = "".join(pydoc_data.topics.topics.values())[:30_000]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", 301)
    monkeypatch.setattr(prepare_module, "READ_BYTES", 13)


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def no_words():
    return "".join(random.Random(3).choices("中文字符", k=3000))


def trained_sentencepiece(text, vocab_size):
    """A BPE tokenizer of SentencePiece's kind with merges: the whole text is one word to it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = sentencepiece_like()._backend.normalizer
    backend.decoder = sentencepiece_like()._backend.decoder
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    backend.train_from_iterator([text[i : i + 50] for i in range(0, len(text), 50)], trainer)
    return Tokenizer({"tokenizer.json": backend.to_str().encode()})


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "trained": lambda: trained(ENGLISH, 500),
    "trained on runs": lambda: trained("yyyyyyyyyyyyyyyy 中文字符 1234567890" * 9, 900),
    "sentencepiece": sentencepiece_like,
    "trained sentencepiece": lambda: trained_sentencepiece(ENGLISH + "y" * 200 + "1234567890" * 100, 1000),
}
TEXTS = {
    "English": ENGLISH,
    "characters of several bytes": "é😀 " * 500,
    "lines and spaces": "a\n\n  b \n" * 300,
    "no words": no_words(),
    "one letter": "x " + "y" * 1000,
    "digits": "1234567890" * 100,
    "special tokens": "a<|endoftext|><s>b</s> " * 100,
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.usefixtures("small_pieces")
def test_pieces_give_the_tokens_of_the_whole_text(kind, text, tmp_path):
    tokenizer = TOKENIZERS[kind]()
    prepare([write(tmp_path / "a.txt", TEXTS[text])], tokenizer, tmp_path / "out")
    tokens = TokenFile(tmp_path / "out")
    ids = tokens.read(0, len(tokens)).tolist()
    whole = tokenizer.encode(TEXTS[text], add_special_tokens=False)
    if tokenizer.eos_id is not None:
        assert ids.pop() == tokenizer.eos_id
    assert ids == whole
    assert "special" in text or "trained" in kind or tokenizer.decode(ids) == TEXTS[text]


def test_a_long_text_without_spaces_gets_none(tmp_path):
    text = "中文字符" * 80_000
    prepare([write(tmp_path / "a.txt", text)], sentencepiece_like(), tmp_path / "out")
    tokens = TokenFile(tmp_path / "out")
    assert sentencepiece_like().decode(tokens.read(0, len(tokens)).tolist()) == text


def test_tokens_that_nowhere_agree_keep_the_text(monkeypatch, tmp_path):
    """What is cut for want of an agreement is cut between two tokens: nothing is lost, doubled or put between."""
    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", 101)
    exact = pieces_module._agree
    never = lambda left, token, right, same, only_places: only_places and exact(left, token, right, same, True)  # noqa: E731
    monkeypatch.setattr(pieces_module, "_agree", never)
    prepare([write(tmp_path / "a.txt", no_words())], sentencepiece_like(), tmp_path / "out")
    tokens = TokenFile(tmp_path / "out")
    assert sentencepiece_like().decode(tokens.read(0, len(tokens)).tolist()) == no_words()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.usefixtures("small_pieces")
def test_a_unigram_tokenizer_keeps_the_text(text, tmp_path):
    """Of a letter that is repeated for long it takes other tokens than those of the whole, but of the same text."""
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=600, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator([ENGLISH, "中文字符 yyyyyyyy 12345 é😀 <s>|" * 50], trainer)
    tokenizer = Tokenizer({"tokenizer.json": backend.to_str().encode()})
    prepare([write(tmp_path / "a.txt", TEXTS[text])], tokenizer, tmp_path / "out")
    tokens = TokenFile(tmp_path / "out")
    ids, whole = tokens.read(0, len(tokens)).tolist(), tokenizer.encode(TEXTS[text], add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    assert ids == whole or text == "one letter"


def test_windows_overlap_and_cover_the_text():
    chunks = [ENGLISH[i : i + 7] for i in range(0, 5000, 7)]
    text = "".join(chunks)
    parts = list(windows(iter(chunks), 100))
    assert all(text[part.start : part.end] == part.text and len(part.text) <= 166 for part in parts)
    assert parts[0].start == 0 and parts[-1].end == len(text) and len(parts) > 49
    assert all(left.end - right.start == 66 for left, right in zip(parts, parts[1:], strict=False))


def test_special_tokens_that_a_text_spells_are_counted(tmp_path):
    text, specials = write(tmp_path / "a", "one<|endoftext|>two<|endoftext|>"), Specials()
    prepare([text], byte_tokenizer(), tmp_path / "out", specials=specials)
    tokens = TokenFile(tmp_path / "out")
    assert tokens.read(0, len(tokens)).tolist() == [*b"one", 256, *b"two", 256, 256]
    assert specials.counts == {256: 2}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_plain_specials_keep_the_letters(kind, tmp_path):
    tokenizer, text, specials = TOKENIZERS[kind](), "one</s><|endoftext|>two", Specials(stay_text=True)
    prepare([write(tmp_path / "a", text)], tokenizer, tmp_path / "out", specials=specials)
    tokens = TokenFile(tmp_path / "out")
    ids = tokens.read(0, len(tokens)).tolist()
    assert not specials.counts and set(ids[:-1]).isdisjoint(tokenizer.special_tokens)
    assert tokenizer.decode(ids) == text
    assert set(tokenizer.encode(text)) & set(tokenizer.special_tokens)  # elsewhere they are tokens as ever


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
        ({"dtype": ["uint16"]}, r"dtype is \['uint16'\], expected one of uint16, uint32"),
        ({"sha256": None}, "sha256 is None, expected a sha256"),
        ({"sha256": "0" * 63}, "sha256 is '0000"),
        ({"tokenizer_sha256": 7}, "tokenizer_sha256 is 7"),
        ({"vocab_size": 1 << 70}, "vocab_size is 1180591620717411303424, expected a whole number from 1 to 2"),
        ({"num_documents": 1.5}, "num_documents is 1.5"),
        ({"sources": "a"}, "sources is 'a', expected a list of names"),
        ({"sources": [1]}, r"sources is \[1\]"),
        ({"crc32": [1, 2]}, "crc32 has 2 sums, expected 1 of"),
        ({"crc32": 5}, "crc32 is 5, expected a list"),
        ({"num_tokens": 10**40}, "truncated, or of another dtype"),
    ],
)
def test_manifests_that_do_not_fit(prepared, changes, words):
    change_manifest(prepared, **changes)
    with pytest.raises(FileError, match=words):
        TokenFile(prepared)


def test_two_halves_are_not_taken_for_one_number(prepared):
    """Read with twice the width the file has half the tokens, and its size and hash fit."""
    path = prepared / "tokens.bin"
    path.write_bytes(path.read_bytes() + path.read_bytes())
    tokens = np.frombuffer(path.read_bytes(), "<u2").astype("<u4").astype("<u2")
    assert len(tokens) % 2 == 0
    change_manifest(prepared, dtype="uint32", num_tokens=len(tokens) // 2)
    with pytest.raises(FileError, match="dtype is 'uint32', but ids of a vocabulary of 257 are stored as uint16"):
        TokenFile(prepared)


def test_vocabulary_of_another_size_than_the_tokenizer_s(prepared):
    change_manifest(prepared, vocab_size=300)
    with pytest.raises(FileError, match="vocab_size is 300, but the tokenizer in tokenizer/ has 257 tokens"):
        TokenFile(prepared).load_tokenizer()


@pytest.mark.parametrize("shares", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("is_old", [False, True])
def test_shares_are_the_whole_file(prepared, monkeypatch, shares, is_old):
    """Every byte is in one share, and one that is another than the manifest says is found in it alone."""
    from mpitp.data import token_file

    monkeypatch.setattr(token_file, "CHUNK_BYTES", 1000)
    path = prepared / "tokens.bin"
    content = path.read_bytes()
    change_manifest(prepared, crc32=[] if is_old else list(token_file._sums(path)[1]))
    for share in range(shares):
        TokenFile(prepared).check_share(share, shares)
    chunks = -(-len(content) // 1000)
    for place in [0, 998, 1000, 5500, len(content) - 4]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        tokens, found = TokenFile(prepared), []
        for share in range(shares):
            try:
                tokens.check_share(share, shares)
            except FileError as error:
                assert "is damaged" in str(error)
                found.append(share)
        assert chunks > 7 and found == [0 if is_old else place // 1000 % shares]


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
