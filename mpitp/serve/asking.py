"""From a checked body to a job: tokens, room, sampling, forms. Raises UsageError for what can't be (status 400)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitp.data.token_bytes import TokenBytes
from mpitp.data.tokenizer import Tokenizer
from mpitp.errors import UsageError
from mpitp.infer.requests import Grammar, room_behind
from mpitp.infer.sampling import Penalties, Sampling
from mpitp.serve.bodies import ChatBody, Common, CompletionBody
from mpitp.serve.chat import ChatTemplate
from mpitp.serve.grammar import Forms
from mpitp.serve.jobs import TextSpec

if TYPE_CHECKING:
    from mpitp.serve.service import Service

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is known of the model: `name` as clients call it, `positions`, ids below `vocab_size`, `ends`."""

    name: str
    tokenizer: Tokenizer
    token_bytes: TokenBytes
    template: ChatTemplate | None
    forms: Forms
    positions: int
    vocab_size: int
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class AskLimits:
    """Of one request: new tokens of a text, and texts (prompts times n)."""

    tokens: int
    texts: int


class Asker:
    """Makes the texts of jobs for a service, which knows what its cache can hold."""

    def __init__(self, model: ServedModel, limits: AskLimits, service: Service) -> None:
        self.model, self.limits, self._service = model, limits, service

    def completion(self, body: CompletionBody) -> list[TextSpec]:
        """The texts of POST /v1/completions."""
        prompts = self._prompts(body.prompt)
        tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return self._specs(body, prompts, tokens, body.logprobs, self._form(body))

    def chat(self, body: ChatBody) -> list[TextSpec]:
        """The texts of POST /v1/chat/completions."""
        if self.model.template is None:
            raise UsageError("the model has no chat template; use /v1/completions")
        if body.top_logprobs is not None and not body.logprobs:
            raise UsageError("top_logprobs needs logprobs to be true")
        text = self.model.template.render([message.plain() for message in body.messages])
        prompt = self._encoded(text, add_special_tokens=False)
        tokens = body.max_completion_tokens or body.max_tokens
        num_best = (body.top_logprobs or 0) if body.logprobs else None
        return self._specs(body, [prompt], tokens, num_best, self._form(body))

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._encoded(prompt)]
        if isinstance(prompt[0], int):
            return [self._known(prompt)]
        return [self._encoded(each) if isinstance(each, str) else self._known(each) for each in prompt]

    def _encoded(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError("the prompt is not UTF-8 text: it has half of a surrogate pair")
        return self._known(self.model.tokenizer.encode(text, add_special_tokens))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        unknown = next((token for token in tokens if token >= self.model.vocab_size), None)
        if unknown is not None:
            raise UsageError(self._outside(unknown))
        return list(tokens)

    def _outside(self, id_: int) -> str:
        """What is said of an id without a row; who runs the server can give an added token one."""
        model, token = self.model, self.model.tokenizer.token(id_)
        added = "" if token is None else f": {token!r:.60} was added to the tokenizer alone"
        return f"token id {id_} lies outside the model's vocabulary of {model.vocab_size}{added}"

    def _specs(
        self,
        body: Common,
        prompts: Sequence[list[int]],
        tokens: int | None,
        num_best: int | None,
        form: Callable[[], Grammar] | None,
    ) -> list[TextSpec]:
        samples = body.n or 1
        if len(prompts) * samples > self.limits.texts:
            raise UsageError(f"{len(prompts) * samples} texts in one request; this server writes {self.limits.texts}")
        if tokens is not None and tokens > self.limits.tokens:
            raise UsageError(f"{tokens} new tokens are asked for; this server writes at most {self.limits.tokens}")
        sampling, ends = self._sampling(body), frozenset() if body.ignore_eos else self.model.ends
        stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        specs = []
        for prompt in prompts:
            room = self._room(prompt, tokens)
            decoder = self._decoder(prompt)
            for occurrence in range(samples):
                grammar = None if form is None else form()
                settings = (prompt, room, sampling, ends, decoder, stops, occurrence, num_best, grammar, occurrence > 0)
                specs.append(TextSpec(*settings))
        return specs

    def _room(self, prompt: Sequence[int], tokens: int | None) -> int:
        """How many new tokens may come: what is asked for; who asks for no number gets what there is room for."""
        room = room_behind(prompt, tokens or self.limits.tokens, self.model.positions)
        if tokens is None:
            room = max(1, min(room, self._service.room_behind(len(prompt))))
        self._service.check(len(prompt), room)
        return room

    def _decoder(self, prompt: Sequence[int]) -> Callable[[], Any]:
        return lambda: self.model.tokenizer.stream_decoder(context=prompt)

    def _sampling(self, body: Common) -> Sampling:
        bias = {}
        for token, value in (body.logit_bias or {}).items():
            if not token.isdecimal() or int(token) >= self.model.vocab_size:
                raise UsageError(f"logit_bias names {token[:30]!r}, which is no token id of the model")
            bias[int(token)] = value
        repetition = 1.0 if body.repetition_penalty is None else body.repetition_penalty
        penalties = Penalties(repetition, body.presence_penalty or 0.0, body.frequency_penalty or 0.0, bias)
        seed = random.getrandbits(63) if body.seed is None else body.seed % 2**63
        temperature = 1.0 if body.temperature is None else body.temperature
        top_p = 1.0 if body.top_p is None else body.top_p
        return Sampling(temperature, body.top_k or 0, top_p, seed, body.min_p or 0.0, penalties)

    def _form(self, body: Common) -> Callable[[], Grammar] | None:
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return self._given_form(body)
        if body.grammar is not None:
            raise UsageError("give response_format or grammar, not both")
        if wanted.type == "json_object":
            return lambda: self.model.forms.json_schema({"type": "object"})
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise UsageError("response_format of type json_schema needs json_schema.schema")
        schema = wanted.json_schema.schema_
        return lambda: self.model.forms.json_schema(schema)

    def _given_form(self, body: Common) -> Callable[[], Grammar] | None:
        form = body.grammar
        if form is None:
            return None
        make = self.model.forms.regex if form.type == "regex" else self.model.forms.lark
        return lambda: make(form.value)
