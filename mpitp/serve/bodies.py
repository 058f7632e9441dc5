"""What may stand in a request's body: the fields of OpenAI's API that are understood, and a few of our own.

An unknown field is refused rather than left out silently. Limits that depend on the server are checked elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=16)]
Metadata = dict[str, str] | None


class Strict(BaseModel):
    """No field but those named."""

    model_config = ConfigDict(extra="forbid")


class Form(Strict):
    """A regular expression or a Lark grammar that the text must fit (our own)."""

    type: Literal["regex", "lark"]
    value: Annotated[str, Field(min_length=1, max_length=100_000)]


class JsonSchema(Strict):
    """The schema of a response's format."""

    name: str = ""
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Free text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Strict):
    """`include_usage`: a last piece with the numbers of tokens."""

    include_usage: bool | None = False


class Common(Strict):
    """What both kinds of completion take."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=200)] | Stops | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    grammar: Form | None = None
    ignore_eos: bool | None = False


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False


class TextPart(Strict):
    """A part of a message; texts only."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """As a template wants it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text}


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    metadata: Metadata = None
