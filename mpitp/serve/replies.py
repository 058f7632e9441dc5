"""What clients get: OpenAI's JSON objects, whole or piece by piece."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitp.data.tokenizer import Tokenizer
from mpitp.infer.sampling import Likelihoods
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


class Reply:
    """The reply to one request: `chat` or a plain completion. `echo`: each text begins with its prompt."""

    def __init__(
        self, specs: Sequence[TextSpec], model: str, tokenizer: Tokenizer, *, chat: bool, echo: bool = False
    ) -> None:
        self.specs, self._tokenizer, self._chat = specs, tokenizer, chat
        self.written = [Written() for _ in specs]
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self._head: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._head["model"] = model
        self._echoes = [tokenizer.decode(spec.prompt) if echo else "" for spec in specs]
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
                "logprobs": self._scores(index, text),
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
        """One more piece of a stream."""
        reason, text = (event.reason, "") if isinstance(event, Ended) else (None, event.text)
        scores = None
        if isinstance(event, Piece) and event.scores:
            scores = self._scores(index, Written(event.text, list(event.tokens), list(event.scores)))
        content = {"delta": {"content": text} if reason is None else {}} if self._chat else {"text": text}
        return self._piece(index, {**content, "logprobs": scores}, reason)

    def last_piece(self) -> dict[str, Any]:
        """The numbers of tokens, for a client that wants them."""
        return {**self._piece_head, "choices": [], "usage": self.usage}

    def _piece(self, index: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._piece_head, "choices": [{"index": index, **content, "finish_reason": reason}]}

    def _scores(self, index: int, text: Written) -> dict[str, Any] | None:
        if self.specs[index].num_best is None:
            return None
        return self._chat_scores(text) if self._chat else self._plain_scores(text)

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _chat_scores(self, text: Written) -> dict[str, Any]:
        content = []
        for token, scores in zip(text.tokens, text.scores, strict=True):
            best = [self._chat_score(other, value) for other, value in scores.best]
            content.append({**self._chat_score(token, scores.chosen), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _chat_score(self, token: int, value: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}

    def _plain_scores(self, text: Written) -> dict[str, Any]:
        tokens = [self._token_text(token) for token in text.tokens]
        starts = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
        best = [{self._token_text(other): value for other, value in scores.best} for scores in text.scores]
        chosen = [scores.chosen for scores in text.scores]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": starts}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
