"""Tokenizers: the byte tokenizer is a real tokenizer.json, special tokens are found, streams emit whole characters."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mpitp.data.tokenizer import Tokenizer, byte_tokenizer, check_fits, load_tokenizer, save_tokenizer, tokenizer_from
from mpitp.errors import ConfigError, FileError

TEXTS = ["", "hello", "é😀\n\t x", "a\x00b", "中文 <|endoftext|> tail", "\ufffd", "  two  spaces  "]
BYTES = byte_tokenizer()


def trained(text, vocab_size=300, **files):
    """A small byte-level BPE tokenizer with merges."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    return Tokenizer({"tokenizer.json": backend.to_str().encode()} | files)


def sentencepiece_like():
    """Llama 2's kind: spaces as U+2581, unknown characters as bytes, a leading space put before every text."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    model = tokenizers.models.BPE(
        vocab={word: i for i, word in enumerate(words)}, merges=merges, byte_fallback=True, unk_token="<unk>"
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer({"tokenizer.json": backend.to_str().encode()})


@pytest.mark.parametrize("text", TEXTS)
def test_the_byte_tokenizer_is_what_the_library_reads_from_its_file(text, tmp_path):
    save_tokenizer(BYTES, tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = BYTES.encode(text)
    assert ids == library.encode(text).ids
    assert BYTES.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False) == text
    if "<|" not in text:
        assert ids == list(text.encode())
    assert (BYTES.vocab_size, BYTES.eos_id, BYTES.bos_id) == (257, 256, 256)


def test_the_quick_way_for_bytes_is_taken_only_by_the_byte_tokenizer(tmp_path):
    save_tokenizer(BYTES, tmp_path)
    assert load_tokenizer(tmp_path)._is_bytes
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    backend["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    assert load_tokenizer(tmp_path).encode("A") == [ord("a")]


def test_loading_and_saving_keep_the_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tokenizer = trained("some text", **{"chat_template.jinja": b"{{ x }}"})
    save_tokenizer(tokenizer, tmp_path / "a")
    again = load_tokenizer(tmp_path / "a")
    save_tokenizer(again, tmp_path / "b")
    assert again.sha256 == tokenizer.sha256
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == tokenizer.files
    assert set(tokenizer.files) == {"tokenizer.json", "chat_template.jinja"}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "</s>", "bos_token": {"content": "<s>", "lstrip": False}}},
        {"special_tokens_map.json": {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}},
        {
            "tokenizer_config.json": {"bos_token": "<s>"},
            "special_tokens_map.json": {"bos_token": "</s>", "eos_token": "</s>"},
        },
    ],
)
def test_special_tokens_in_all_spellings(files):
    tokenizer = trained("abc", **{name: json.dumps(value).encode() for name, value in files.items()})
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_a_bos_is_added_when_the_config_says_so():
    config = {"bos_token": "<s>", "add_bos_token": True}
    tokenizer = trained("abc", **{"tokenizer_config.json": json.dumps(config).encode()})
    assert tokenizer.encode("ab") == [0, *tokenizer.encode("ab", add_special_tokens=False)]
    backend = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    for add_bos, expected in ((True, [0]), (None, [0]), (False, [])):
        files = {"tokenizer.json": backend.to_str().encode()}
        files["tokenizer_config.json"] = json.dumps(config | {"add_bos_token": add_bos}).encode()
        ids = Tokenizer(files).encode("ab")
        assert ids == expected + tokenizer.encode("ab", add_special_tokens=False)
    assert Tokenizer(files).encode("<s>ab")[0] == 0


def test_truncation_and_padding_of_the_file_are_not_obeyed():
    tokenizer = trained("abc")
    backend = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(Tokenizer({"tokenizer.json": backend.to_str().encode()}).encode("x y z")) == 5


def test_damaged_and_missing_tokenizers(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(FileError, match=r"holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content, words in (("{", "is not JSON"), ("[]", "JSON object"), ("{}", "not understood")):
        path.write_text(content)
        with pytest.raises(FileError, match=words):
            load_tokenizer(tmp_path)
    with pytest.raises(FileError, match="is a file"):
        load_tokenizer(path)
    save_tokenizer(BYTES, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nix>"}')
    with pytest.raises(FileError, match="eos_token is '<nix>'"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_larger_than_the_model():
    check_fits(BYTES, 257, "data")
    with pytest.raises(ConfigError, match="ids up to 256, but the model's vocab_size is 256"):
        check_fits(BYTES, 256, "data")


def test_the_name_bytes(tmp_path, monkeypatch):
    assert tokenizer_from("bytes").sha256 == BYTES.sha256
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").mkdir()
    with pytest.raises(FileError, match=r"holds no tokenizer.json"):
        tokenizer_from("bytes")


# Streaming


def stream(tokenizer, ids):
    decoder = tokenizer.stream_decoder(skip_special_tokens=False)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


def test_a_character_cut_across_tokens_waits():
    assert stream(BYTES, "é😀!".encode()) == ["", "é", "", "", "", "😀", "!", ""]
    assert stream(BYTES, "a😀".encode()[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_left_out_of_a_stream():
    decoder = BYTES.stream_decoder()
    assert [decoder.push(i) for i in (97, 256, 98)] == ["a", "", "b"]


def test_leading_spaces_survive_within_a_stream():
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode("ab ab a é b")
    assert tokenizer.decode(ids) == "ab ab a é b"
    assert "".join(stream(tokenizer, ids)) == "ab ab a é b"


@given(st.lists(st.integers(0, 256), max_size=24))
def test_a_stream_of_any_bytes_is_the_whole_decoded(ids):
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=20))
def test_a_stream_of_text_never_shows_half_a_character(text):
    for tokenizer in (BYTES, sentencepiece_like()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == whole
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole
