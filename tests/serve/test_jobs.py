"""Tokens into text with stop strings, templates, keys: what needs no server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from mpitp.data.tokenizer import Tokenizer, byte_tokenizer
from mpitp.errors import FileError, UsageError
from mpitp.infer.orders import Reason
from mpitp.infer.sampling import Sampling
from mpitp.serve.chat import ChatTemplate, chat_template
from mpitp.serve.command import KEY_VARIABLE, read_keys
from mpitp.serve.grammar import Forms
from mpitp.serve.jobs import Ended, Event, Piece, TextListener, TextSpec
from tests.serve.served import TEMPLATE


@pytest.mark.parametrize(
    ("text", "stops", "expected", "reason"),
    [
        ("one two three", (), "one two three", Reason.LENGTH),
        ("one two three", ("two",), "one ", Reason.STOP),
        ("one two three", ("e t", "two", "xyz"), "on", Reason.STOP),
        ("one twx", ("two",), "one twx", Reason.LENGTH),
        ("one tw", ("two",), "one tw", Reason.EOS),
        ("aaab", ("aab",), "a", Reason.STOP),
        ("häuser", ("us",), "hä", Reason.STOP),
    ],
)
def test_a_stop_string_ends_a_text_before_itself(
    text: str, stops: tuple[str, ...], expected: str, reason: Reason
) -> None:
    events: list[Event] = []
    spec = TextSpec([1], 99, Sampling(), frozenset(), byte_tokenizer().stream_decoder, stops)
    ends: list[int] = []
    listener = TextListener(spec, events.append, lambda: ends.append(1))
    for token in text.encode():
        if not listener.token(token, None):
            break
        shown = "".join(event.text for event in events if isinstance(event, Piece))
        assert expected.startswith(shown), "text is never taken back"
    listener.end(reason)
    assert "".join(event.text for event in events if isinstance(event, Piece)) == expected
    assert isinstance(events[-1], Ended) and ends == [1]
    told = [token for event in events if isinstance(event, Piece) for token in event.tokens]
    assert bytes(told) == text.encode()[: len(told)] and len(told) >= len(expected.encode())


def test_templates_are_rendered_in_a_sandbox() -> None:
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "hi"}]) == "user: hi\nassistant:"
    with pytest.raises(UsageError, match="system comes first"):
        template.render([{"role": "user", "content": "hi"}, {"role": "system", "content": "x"}])
    for hostile in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 // 0 }}", "{{ nothing.there }}"):
        with pytest.raises(UsageError, match="refuses these messages"):
            ChatTemplate(hostile, {}).render([])
    assert ChatTemplate("{{ bos_token }}{{ [1, 'é'] | tojson }}", {"bos_token": "<s>"}).render([]) == '<s>[1, "é"]'


def test_where_a_template_is_found() -> None:
    files = dict(byte_tokenizer().files)
    assert chat_template(Tokenizer(files)) is None
    document = json.loads(files["tokenizer_config.json"])
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    files["tokenizer_config.json"] = json.dumps(document | {"chat_template": named}).encode()
    found = chat_template(Tokenizer(files))
    assert found is not None and found.render([]) == "<|endoftext|>"
    files["chat_template.jinja"] = b"{{ messages | length }}"
    found = chat_template(Tokenizer(files))
    assert found is not None and found.render([{}, {}]) == "2"
    files["chat_template.jinja"] = b"{% if %}"
    with pytest.raises(FileError, match="can't be read"):
        chat_template(Tokenizer(files))


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nalpha\n\n beta \n")
    assert read_keys(str(tmp_path / "keys"), {}) == [b"alpha", b"beta"]
    assert read_keys(None, {KEY_VARIABLE: "gamma"}) == [b"gamma"] and read_keys(None, {}) == []
    assert read_keys(None, {KEY_VARIABLE: " gamma\n"}) == [b"gamma"]
    assert read_keys(str(tmp_path / "keys"), {KEY_VARIABLE: ""}) == [b"alpha", b"beta"]
    with pytest.raises(UsageError, match="is empty; give it the key, or unset it"):
        read_keys(None, {KEY_VARIABLE: " "})
    (tmp_path / "none").write_text("# nothing\n")
    for name in ("none", "missing"):
        with pytest.raises(FileError):
            read_keys(str(tmp_path / name), {})


def test_forms_say_what_may_come() -> None:
    forms = Forms(byte_tokenizer(), 260, [256])
    form = forms.regex("ab?")
    assert form.allowed().nonzero()[0].tolist() == [97]
    assert form.accept(97) and form.allowed().nonzero()[0].tolist() == [98, 256]
    assert not form.accept(98), "nothing can follow"
    with pytest.raises(UsageError, match="JSON schema can't be used: .*minimum"):
        forms.json_schema({"type": "integer", "minimum": 5, "maximum": 3})
    with pytest.raises(UsageError, match="end-of-text"):
        Forms(byte_tokenizer(), 260, []).regex("a")


def test_forms_leave_out_added_tokens_without_a_row() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().files["tokenizer.json"].decode())
    backend.add_tokens(["aa", "aaa"])  # 257 and 258: the model has 257 rows
    form = Forms(Tokenizer({"tokenizer.json": backend.to_str().encode()}), 257, [256]).regex("aa+")
    mask = form.allowed()
    assert len(mask) == 257 and mask.nonzero()[0].tolist() == [97]
