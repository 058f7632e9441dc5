"""Sentences with a label a word: the files, the words among tokens, and the F1 of what was told."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from mpitp.data.spans import Counts, counts_of, f1_of, marks_spans, spans_of
from mpitp.data.tagged import read_tagged
from mpitp.data.tokenizer import Tokenizer, byte_tokenizer
from mpitp.data.words import place_words
from mpitp.errors import FileError

CONLL = "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\nAda\tB-PER\n  \n"


def test_columns_of_conll_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(CONLL)
    found = read_tagged(tmp_path / "a")
    assert [(each.words, each.labels, each.line) for each in found.sentences] == [
        (("EU", "rejects"), ("B-ORG", "O"), 3),
        (("Ada",), ("B-PER",), 7),
    ]
    assert found.classes() == ("B-ORG", "B-PER", "O")
    assert found.targets(("O", "B-PER", "B-ORG")) == [[2, 0], [1]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Ada\tB-PER\nsleeps\n", "line 2: expected WORD TAB LABEL, found 'sleeps' alone"),
        ("Ada\t\n", "line 1: the label is empty"),
        ("\tO\n", "line 1: the word is empty"),
        ("\n-DOCSTART- O\n\n", "holds no sentence; expected a word a line"),
        ("Ada\tB-PER\nsleeps\tX\n", "line 2: label 'X' is none of the 2 classes (B-PER, O)"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(FileError) as caught:
        read_tagged(tmp_path / "a").targets(("B-PER", "O"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("O O", []),
        ("B-A I-A O", [(0, 2, "A")]),
        ("I-A I-A I-B B-B", [(0, 2, "A"), (2, 3, "B"), (3, 4, "B")]),
        ("B-A E-A S-A S-B I-B", [(0, 2, "A"), (2, 3, "A"), (3, 4, "B"), (4, 5, "B")]),
        ("B I O I", [(0, 2, ""), (3, 4, "")]),
    ],
)
def test_spans_begin_and_end_as_in_conlleval(labels: str, expected: list[tuple[int, int, str]]) -> None:
    assert spans_of(labels.split()) == expected


def test_f1_of_spans_and_of_plain_labels() -> None:
    wanted, found = "B-A I-A O B-B".split(), "B-A I-A B-B B-B".split()
    assert counts_of(wanted, found, as_spans=True) == Counts(2, 3, 2)
    assert counts_of(wanted, "B-A O O B-B".split(), as_spans=True) == Counts(1, 2, 2)
    assert counts_of("N V O".split(), "N N N".split(), as_spans=False) == Counts(1, 3, 2)
    assert (f1_of(2, 3, 2), f1_of(0, 0, 0)) == (0.8, 0.0)
    assert marks_spans(("B-A", "I-A", "O")) and not marks_spans(("NOUN", "VERB", "O")) and not marks_spans(("O",))


def test_words_are_told_by_their_first_tokens() -> None:
    (placed,) = place_words(byte_tokenizer(), [["né", "é", "ab"]], most=7)  # two bytes for é; the last word is cut off
    assert placed.ids == list("né é ".encode())
    assert placed.firsts == (0, 4, None)
    assert placed.spread([5, 6, 7], -1).tolist() == [5, -1, -1, -1, 6, -1, -1]


def word_pieces() -> Tokenizer:
    """Lower case, pieces of words, and a token before and behind each text, as BERT has it."""
    vocabulary = {word: i for i, word in enumerate("[UNK] [CLS] [SEP] play ##ing don ' t".split())}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return Tokenizer({"tokenizer.json": backend.to_str().encode()})


def test_words_of_several_pieces_and_of_none() -> None:
    (placed,) = place_words(word_pieces(), [["Don't", "\x7f", "Playing"]], most=9)
    assert placed.ids == [1, 5, 6, 7, 3, 4, 2]
    assert placed.firsts == (1, None, 4)
    (short,) = place_words(word_pieces(), [["Don't", "Playing"]], most=5)
    assert (short.ids, short.firsts) == ([1, 5, 6, 7, 2], (1, None))
