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


SENTENCEPIECE = sentencepiece_like()


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


def with_template(tokenizer, bos, bos_id):
    """The tokenizer's tokenizer.json with a template that puts a bos before every text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bos_id)]
    )
    return {**tokenizer.files, "tokenizer.json": backend.to_str().encode()}


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("template", [False, True])
def test_a_byte_tokenizer_adds_its_bos(add_bos, template):
    files = with_template(BYTES, "<|endoftext|>", 256) if template else dict(BYTES.files)
    config = {"bos_token": "<|endoftext|>", "add_bos_token": add_bos}
    tokenizer = Tokenizer(files | {"tokenizer_config.json": json.dumps(config).encode()})
    expected = [256] if add_bos or (template and add_bos is None) else []
    assert tokenizer._is_bytes
    assert tokenizer.encode("ab") == [*expected, *b"ab"]
    assert tokenizer.encode("ab", add_special_tokens=False) == [*b"ab"]


ALMOST_BYTES = {
    "a suffix of words": {"end_of_word_suffix": "x"},
    "a prefix of what goes on": {"continuing_subword_prefix": "##"},
    "whole words only": {"type": "WordLevel", "unk_token": "!"},
    "words of at most 4 letters": {
        "type": "WordPiece",
        "unk_token": "!",
        "continuing_subword_prefix": "",
        "max_input_chars_per_word": 4,
    },
}


@pytest.mark.parametrize("changes", ALMOST_BYTES.values(), ids=ALMOST_BYTES)
def test_what_has_the_byte_tokenizers_vocabulary_alone_is_encoded_by_the_library(changes):
    document = json.loads(BYTES.files["tokenizer.json"])
    model = document["model"]
    document["model"] = {"vocab": model["vocab"], **changes} if "type" in changes else model | changes
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer = Tokenizer(BYTES.files | {"tokenizer.json": json.dumps(document).encode()})
    for text in ("The cat, et cetera", "ééé"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert ids != list(text.encode())
        assert tokenizer.encode(text, add_special_tokens=False) == list(tokenizer.encode_spans([text])[0].ids) == ids


def test_merges_are_not_left_out_at_random():
    document = json.loads(trained("hello hello hello " * 20).files["tokenizer.json"])
    whole = Tokenizer({"tokenizer.json": json.dumps(document).encode()}).encode("hello hello")
    document["model"]["dropout"] = 0.9
    tokenizer = Tokenizer({"tokenizer.json": json.dumps(document).encode()})
    assert len(whole) < 5 and all(tokenizer.encode("hello hello") == whole for _ in range(20))


@pytest.mark.parametrize("config", [{}, {"bos_token": "<s>"}, {"bos_token": "<s>", "add_bos_token": True}])
def test_a_bos_that_the_prompt_has_is_not_doubled(config):
    files = with_template(trained("abc"), "<s>", 0)
    tokenizer = Tokenizer(files | {"tokenizer_config.json": json.dumps(config).encode()})
    assert tokenizer.encode("<s>ab") == tokenizer.encode("ab")
    assert tokenizer.encode("ab")[0] == 0 and tokenizer.encode("ab").count(0) == 1


NEW_TOKEN = {"content": "<|im_end|>", "special": True, "normalized": False}


@pytest.mark.parametrize(
    ("files", "is_special"),
    [
        ({"added_tokens.json": {"<|im_end|>": 257}}, False),
        ({"added_tokens.json": {"<|im_end|>": 257}, "tokenizer_config.json": {"eos_token": "<|im_end|>"}}, True),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"257": NEW_TOKEN}}}, True),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"257": NEW_TOKEN | {"special": False}}}}, False),
        (
            {
                "tokenizer_config.json": {"added_tokens_decoder": {"257": NEW_TOKEN}, "eos_token": "<|im_end|>"},
                "added_tokens.json": {"<|im_end|>": 257},
            },
            True,
        ),
        ({"tokenizer_config.json": {"additional_special_tokens": ["<|im_end|>"]}}, True),
        ({"tokenizer_config.json": {"extra_special_tokens": {"end_token": "<|im_end|>"}}}, True),
    ],
)
def test_tokens_that_only_other_files_declare_are_one_token(files, is_special):
    encoded = {name: json.dumps(content).encode() for name, content in files.items()}
    tokenizer = Tokenizer(BYTES.files | encoded)
    assert tokenizer.encode("a<|im_end|>b") == [97, 257, 98]
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode([97, 257, 98]) == ("ab" if is_special else "a<|im_end|>b")


def test_several_added_tokens_keep_their_ids():
    added = {"<c>": 259, "<a>": 257, "<b>": 258}
    tokenizer = Tokenizer(BYTES.files | {"added_tokens.json": json.dumps(added).encode()})
    assert tokenizer.encode("<c><a><b>") == [259, 257, 258]


def test_a_token_of_the_vocabulary_that_a_role_makes_special():
    config = {"eos_token": "c", "added_tokens_decoder": {"98": {"content": "b", "special": True}}}
    tokenizer = Tokenizer(BYTES.files | {"tokenizer_config.json": json.dumps(config).encode()})
    assert tokenizer.encode("abc") == [97, 98, 99] and tokenizer.decode([97, 98, 99]) == "a"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("added_tokens.json", {"<a>": 300}, "'<a>' has the id 300, but with tokenizer.json its id is 257"),
        ("added_tokens.json", {"a": 257}, "'a' has the id 257, but with tokenizer.json its id is 97"),
        ("added_tokens.json", {"<a>": "257"}, "must map tokens to ids"),
        ("added_tokens.json", {"<a>": True}, "must map tokens to ids"),
        ("added_tokens.json", ["<a>"], "must hold a JSON object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"258": "<a>"}}, "has the id 258"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"-1": "<a>"}}, "must map ids to tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: "<a>"}}, "beyond any vocabulary"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<a>"]}, "must map ids to tokens"),
        ("tokenizer_config.json", {"eos_token": ["a"]}, "eos_token must be a token's text"),
        ("tokenizer_config.json", {"eos_token": {"content": 5}}, "eos_token must be a token's text"),
        ("tokenizer_config.json", {"eos_token": {"id": 5}}, "eos_token must be a token's text"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    ],
)
def test_declarations_that_do_not_fit(name, content, words):
    with pytest.raises(FileError, match=words):
        Tokenizer(BYTES.files | {name: json.dumps(content).encode()})


def test_added_tokens_with_other_ids_than_they_get():
    document = json.loads(BYTES.files["tokenizer.json"])
    document["added_tokens"][0]["id"] = 300
    with pytest.raises(FileError, match="has the id 300"):
        Tokenizer({"tokenizer.json": json.dumps(document).encode()})


@pytest.mark.filterwarnings("ignore")
def test_panics_of_the_library_are_file_errors():
    """Its BPE panics when a merge's result has no token; that is no Exception."""
    document = json.loads(trained("abc").files["tokenizer.json"])
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    with pytest.raises(FileError, match="tokenizer.json"):
        Tokenizer({"tokenizer.json": json.dumps(document).encode()}).encode("ab")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
def test_files_nested_beyond_all_reason(name):
    with pytest.raises(FileError, match=f"{name} is not JSON"):
        Tokenizer(BYTES.files | {name: b'{"a": ' + b"[" * 100_000})


def changed(**parts):
    document = json.loads(trained("abc abd").files["tokenizer.json"])
    return {"tokenizer.json": json.dumps(document | parts).encode()}


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [999_999], "tokens": ["<s>"]}},
}


@pytest.mark.parametrize(
    "parts",
    [
        {"post_processor": TEMPLATE},
        {"post_processor": TEMPLATE | {"special_tokens": {}}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "<unk>"}},
        {"model": {"type": "Unigram", "vocab": [["b", 0.0]], "unk_id": 7}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": None}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "byte_fallback": True, "unk_token": "<unk>"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"decoder": {"type": "Strip", "content": " ", "start": 10**12, "stop": 10**12}},
    ],
    ids=range(10),
)
def test_parts_that_do_not_fit_are_file_errors_or_work(parts):
    """The library finds some of it out when text comes, by an exception or by a panic, which is no Exception."""
    try:
        tokenizer = Tokenizer(changed(**parts))
        tokenizer.decode(tokenizer.encode("abc é"))
        tokenizer.encode_spans(["abc", "é"])
    except FileError as error:
        assert "tokenizer.json" in str(error)
    else:
        assert max(tokenizer.encode("abc"), default=0) < max(tokenizer.vocab_size, 1)


@pytest.mark.parametrize("first", ["added_tokens", "model"])
def test_own_tokens_are_checked_wherever_they_stand(first):
    """Before the vocabulary, as the library writes them, or behind it; what is damaged behind them is told too."""
    document = json.loads(BYTES.files["tokenizer.json"])
    parts = {first: document[first]} | document
    good = json.dumps(parts, indent=1).encode()
    assert Tokenizer({"tokenizer.json": good}).encode("é<|endoftext|>") == [0xC3, 0xA9, 256]
    parts["added_tokens"] = [parts["added_tokens"][0] | {"id": 300}]
    with pytest.raises(FileError, match="has the id 300, but with tokenizer.json its id is 256"):
        Tokenizer({"tokenizer.json": json.dumps(parts).encode()})
    with pytest.raises(FileError, match="tokenizer.json is not JSON"):
        Tokenizer({"tokenizer.json": good[:-5]})


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
    check_fits(BYTES, 256, "data")  # the end of a text was added: it may lack a row where no text has it
    with pytest.raises(ConfigError, match="ids up to 255, but the model's vocab_size is 255: it is another model's"):
        check_fits(BYTES, 255, "data")


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


@pytest.mark.parametrize("prompt", ["a b", "a", "ab ", "<s>a b", "é", "a</s>", "a b <s>"])
@pytest.mark.parametrize("new", [" a b", "b", " </s> a", "  a", " é b", "é"])
def test_a_continuation_keeps_its_first_space(prompt, new):
    """The text of prompt and continuation together, whether it is streamed or not."""
    tokenizer = sentencepiece_like()
    before = tokenizer.encode(prompt)
    ids = tokenizer.encode("a" + new)[1:]  # what follows the first letter
    whole = tokenizer.decode(before + ids)
    text = tokenizer.decode_after(before, ids)
    assert tokenizer.decode(before) + text == whole
    decoder = tokenizer.stream_decoder(context=before)
    assert "".join([decoder.push(i) for i in ids] + [decoder.flush()]) == text


def test_special_tokens_within_a_stream_take_no_space_away():
    tokenizer = sentencepiece_like()
    a, b, end = tokenizer.encode("a b")[0], tokenizer.encode("ab")[0], 2
    for ids in ([a, end, a, b], [end, a], [a, end, end, end, b], [a, end, 259, b]):
        decoder = tokenizer.stream_decoder()
        assert "".join([decoder.push(i) for i in ids] + [decoder.flush()]) == tokenizer.decode(ids)


@given(st.lists(st.integers(3, 264), max_size=12), st.lists(st.integers(3, 264), max_size=12))
def test_a_stream_of_sentencepiece_tokens_goes_on_with_any_context(context, ids):
    tokenizer = SENTENCEPIECE
    whole = tokenizer.decode(context + ids)
    # a prompt is whole characters; and of bytes that are no UTF-8 the library takes back what was whole before
    if "\ufffd" not in tokenizer.decode(context) + whole:
        assert tokenizer.decode(context) + tokenizer.decode_after(context, ids) == whole


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
