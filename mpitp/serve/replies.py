"""What clients get: OpenAI's JSON objects, whole or piece by piece."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitp.data.token_bytes import NEAR, shown
from mpitp.infer.sampling import Likelihoods
from mpitp.serve.asking import ServedModel
from mpitp.serve.jobs import Ended, Piece, TextSpec


@dataclass(slots=True)
class Written:
    """What has come of one text so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[Likelihoods] = field(default_factory=list)
    reason: str | None = None

    def add(self, event: Piece | Ended) -> None:
        """Take an event of this text."""
        if isinstance(event, Ended):
            self.reason = event.reason
            return
        self.text += event.text
        self.tokens += event.tokens
        self.scores += event.scores


@dataclass(frozen=True, slots=True)
class _Scored:
    """A token with its likelihoods; `context`: tokens before it."""

    context: list[int]
    token: int
    scores: Likelihoods


class Reply:
    """The reply to one request: `chat` or a plain completion. `echo`: each text begins with its prompt."""

    def __init__(self, specs: Sequence[TextSpec], model: ServedModel, *, chat: bool, echo: bool = False) -> None:
        self.specs, self._chat = specs, chat
        self.written = [Written() for _ in specs]
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self._head: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._head["model"] = model.name
        self._bytes = model.token_bytes
        self._echoes = [model.tokenizer.decode(spec.prompt) if echo else "" for spec in specs]
        self._told = [0] * len(specs)  # tokens of each text whose likelihoods have been told
        self._offsets = [len(echo) for echo in self._echoes]  # characters of each text before its next token
        self._decoders = [spec.decoder() for spec in specs]
        self._piece_head = self._head | {"object": "chat.completion.chunk" if chat else kind}

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens; a prompt counts once however many texts continue it."""
        prompt = sum(len(spec.prompt) for spec in self.specs if not spec.sibling)
        new = sum(len(text.tokens) for text in self.written)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self) -> dict[str, Any]:
        """The reply, once all texts have ended."""
        choices = []
        for index, text in enumerate(self.written):
            choice: dict[str, Any] = {
                "index": index,
                "finish_reason": text.reason,
                "logprobs": self._scores(index),
            }
            if self._chat:
                choice["message"] = {"role": "assistant", "content": text.text, "refusal": None}
            else:
                choice["text"] = self._echoes[index] + text.text
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": self.usage}

    def first_pieces(self) -> list[dict[str, Any]]:
        """What a stream begins with: the role of a chat, an echoed prompt."""
        if self._chat:
            return [self._piece(i, {"delta": {"role": "assistant", "content": ""}}) for i in range(len(self.specs))]
        return [self._piece(i, {"text": echo}) for i, echo in enumerate(self._echoes) if echo]

    def piece(self, index: int, event: Piece | Ended) -> dict[str, Any]:
        """One more piece of a stream, which has been added to what is `written`."""
        reason, text = (event.reason, "") if isinstance(event, Ended) else (None, event.text)
        scores = self._scores(index) if isinstance(event, Piece) and event.scores else None
        content = {"delta": {"content": text} if reason is None else {}} if self._chat else {"text": text}
        return self._piece(index, {**content, "logprobs": scores}, reason)

    def last_piece(self) -> dict[str, Any]:
        """The numbers of tokens, for a client that wants them."""
        return {**self._piece_head, "choices": [], "usage": self.usage}

    def _piece(self, index: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._piece_head, "choices": [{"index": index, **content, "finish_reason": reason}]}

    def _scores(self, index: int) -> dict[str, Any] | None:
        """The likelihoods of a text's tokens that haven't been told yet; None: they aren't wanted."""
        if self.specs[index].num_best is None:
            return None
        text, first = self.written[index], self._told[index]
        self._told[index] = len(text.tokens)
        new = [
            _Scored(self._context(index, place), text.tokens[place], text.scores[place])
            for place in range(first, len(text.tokens))
        ]
        return self._chat_scores(new) if self._chat else self._plain_scores(index, new)

    def _context(self, index: int, place: int) -> list[int]:
        """Some tokens before one of a text."""
        return [*self.specs[index].prompt[-NEAR:], *self.written[index].tokens[max(0, place - NEAR) : place]]

    def _chat_scores(self, new: Sequence[_Scored]) -> dict[str, Any]:
        content = []
        for each in new:
            best = [self._chat_score(each, other, value) for other, value in each.scores.best]
            content.append({**self._chat_score(each, each.token, each.scores.chosen), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _chat_score(self, place: _Scored, token: int, value: float) -> dict[str, Any]:
        content = self._bytes.of(token, place.context)
        return {"token": shown(content), "logprob": value, "bytes": list(content)}

    def _plain_scores(self, index: int, new: Sequence[_Scored]) -> dict[str, Any]:
        starts = []
        for each in new:
            starts.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].push(each.token))
        best = [
            {shown(self._bytes.of(other, each.context)): value for other, value in each.scores.best} for each in new
        ]
        tokens = [shown(self._bytes.of(each.token, each.context)) for each in new]
        chosen = [each.scores.chosen for each in new]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": starts}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
