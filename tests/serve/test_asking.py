"""From bodies to texts: the room that is given, forms of both kinds of completion, likelihoods of parts of letters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpitp.data.token_bytes import TokenBytes
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import UsageError
from mpitp.infer.engine import Engine
from mpitp.infer.sampling import Likelihoods
from mpitp.infer.schedule import Limits
from mpitp.serve.asking import Asker, AskLimits, ServedModel
from mpitp.serve.bodies import ChatBody, CompletionBody
from mpitp.serve.chat import ChatTemplate
from mpitp.serve.grammar import Forms
from mpitp.serve.jobs import Piece
from mpitp.serve.replies import Reply
from mpitp.serve.service import Service
from tests.infer.imagined import ImaginedExecutor
from tests.serve.served import TEMPLATE

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
HI = [{"role": "user", "content": "hi"}]


def made_asker(num_blocks: int = 2) -> Asker:
    """Of a model with 512 positions and a cache of so many blocks of 16 tokens."""
    tokenizer = byte_tokenizer()
    forms, ends = Forms(tokenizer, 260, [256]), frozenset([256])
    model = ServedModel("m", tokenizer, TokenBytes(tokenizer), ChatTemplate(TEMPLATE, {}), forms, 512, 260, ends)
    engine = Engine(ImaginedExecutor(num_blocks), Limits(4, 40))  # type: ignore[arg-type]
    return Asker(model, AskLimits(100, 8), Service(engine, 8, lambda batch: None))


def test_who_asks_for_no_number_gets_what_there_is_room_for() -> None:
    body: dict[str, Any] = {"messages": HI}
    (text,) = made_asker(2).chat(ChatBody(**body))
    assert len(text.prompt) + text.room - 1 == 32, "the whole cache"
    assert made_asker(20).chat(ChatBody(**body))[0].room == 100, "the server's limit"
    with pytest.raises(UsageError, match="don't fit into the cache of 32 tokens"):
        made_asker(2).chat(ChatBody(**body, max_tokens=100))
    with pytest.raises(UsageError, match="don't fit into the cache of 16 tokens"):
        made_asker(1).chat(ChatBody(**body))


def test_null_stands_for_what_is_not_given() -> None:
    """As clients send it for every option that they don't use, of the API's own fields and of ours."""
    for kind, needed in ((CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": HI})):
        options = {name: None for name in kind.model_fields if name not in needed} | {"seed": 3}
        ask = Asker.completion if kind is CompletionBody else Asker.chat
        nulls, plain = (ask(made_asker(), kind.model_validate(needed | more)) for more in (options, {"seed": 3}))
        assert (nulls[0].sampling, nulls[0].room, nulls[0].ends) == (plain[0].sampling, plain[0].room, plain[0].ends)


def test_a_response_format_holds_for_both_kinds() -> None:
    bodies = CompletionBody.model_validate({"prompt": "a", "response_format": SCHEMA})
    chats = ChatBody.model_validate({"messages": HI, "response_format": SCHEMA, "max_tokens": 5})
    for (text,) in (made_asker(4).completion(bodies), made_asker(4).chat(chats)):
        assert text.grammar is not None
        assert {chr(i) for i in text.grammar.allowed().nonzero()[0]} == {"t", "f"}
    for kind in ({"type": "text"}, None):
        body = CompletionBody.model_validate({"prompt": "a", "response_format": kind})
        assert made_asker().completion(body)[0].grammar is None
    both = {"prompt": "a", "response_format": SCHEMA, "grammar": {"type": "regex", "value": "a"}}
    with pytest.raises(UsageError, match="not both"):
        made_asker().completion(CompletionBody.model_validate(both))


def scored(text: str, *, chat: bool, echo: bool = False, pieces: int = 1) -> tuple[Reply, list[dict[str, Any]]]:
    """A reply to which a text has come byte by byte, in so many pieces, and what a stream would have been told."""
    asker = made_asker(20)
    if chat:
        specs = asker.chat(ChatBody.model_validate({"messages": HI, "logprobs": True, "top_logprobs": 2}))
    else:
        specs = asker.completion(CompletionBody.model_validate({"prompt": "ä", "logprobs": 2, "echo": echo}))
    reply, tokens, told = Reply(specs, asker.model, chat=chat, echo=echo), list(text.encode()), []
    decoder = specs[0].decoder()
    for number in range(pieces):
        some = tuple(tokens[number * len(tokens) // pieces : (number + 1) * len(tokens) // pieces])
        scores = tuple(Likelihoods(-1.0, ((token, -1.0), (0x80, -2.0))) for token in some)
        event = Piece("".join(map(decoder.push, some)), some, scores)
        reply.written[0].add(event)
        told.append(reply.piece(0, event)["choices"][0])
    return reply, told


@pytest.mark.parametrize(("echo", "pieces"), [(False, 1), (True, 1), (False, 3), (True, 5)])
def test_likelihoods_of_a_completion_know_where_their_tokens_stand(echo: bool, pieces: int) -> None:
    _, told = scored("aé漢b", chat=False, echo=echo, pieces=pieces)
    offsets = [offset for choice in told for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [place + echo for place in (0, 1, 1, 2, 2, 2, 3)]
    tokens = [token for choice in told for token in choice["logprobs"]["tokens"]]
    assert tokens == ["a", *(rf"bytes:\x{byte:02x}" for byte in "é漢".encode()), "b"]
    best = [entry for choice in told for entry in choice["logprobs"]["top_logprobs"]]
    assert best[1] == {r"bytes:\xc3": -1.0, r"bytes:\x80": -2.0}, "parts of characters are told apart"


def test_likelihoods_of_a_chat_hold_the_bytes_of_each_token() -> None:
    reply, told = scored("aé漢b", chat=True, pieces=2)
    content = [token for choice in told for token in choice["logprobs"]["content"]]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "aé漢b"
    assert [entry["bytes"] for entry in content[1]["top_logprobs"]] == [[0xC3], [0x80]]
    assert json.dumps(reply.whole())
