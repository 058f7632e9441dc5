"""A conversation as one text, by the chat template of the model's directory (Jinja, in a sandbox)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from mpitp.data.tokenizer import CONFIG, Tokenizer
from mpitp.errors import FileError, UsageError

TEMPLATE = "chat_template.jinja"


class ChatTemplate:
    """`render(messages)` gives the prompt, up to where the assistant speaks."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._template, self._special = environment.from_string(source), dict(special)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt. Raises UsageError where the template refuses the messages."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except Exception as error:  # a template is a program: it may do anything wrong
            raise UsageError(f"the model's chat template refuses these messages: {str(error)[:300]}") from error


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The directory's own template; None: it has none. Raises FileError for one that is no template."""
    from jinja2 import TemplateError

    document = json.loads(tokenizer.files.get(CONFIG, b"{}"))
    source = document.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if TEMPLATE in tokenizer.files:
        source = tokenizer.files[TEMPLATE].decode("utf-8", "replace")
    if not isinstance(source, str):
        return None
    special = {name: _token_text(document.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    try:
        return ChatTemplate(source, special)
    except TemplateError as error:
        raise FileError(f"the model's chat template can't be read: {error}") from error


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
