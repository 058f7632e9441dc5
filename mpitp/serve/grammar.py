"""Texts that must have a form (a JSON schema, a regular expression, a Lark grammar), by the llguidance library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpitp.data.tokenizer import TOKENIZER, Tokenizer
from mpitp.errors import UsageError
from mpitp.infer.requests import Grammar


class Forms:
    """Makes grammars for one tokenizer, whose ids a model with `vocab_size` rows has; `ends`: its end tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        self._content, self._vocab_size, self._ends = tokenizer.files[TOKENIZER].decode(), vocab_size, sorted(ends)
        self._num_ids = max(vocab_size, tokenizer.vocab_size)  # added tokens may have no row: `allowed` leaves them out
        self._made: Any = None

    def json_schema(self, schema: Any) -> Grammar:
        """Text that is JSON and fits the schema. Raises UsageError for a schema that nothing can meet."""
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})
        except ValueError as error:
            raise UsageError(f"the JSON schema can't be used: {error}") from error
        return self._matcher(grammar, "the JSON schema")

    def regex(self, pattern: str) -> Grammar:
        """Text that fits a regular expression."""
        from llguidance import LLMatcher

        return self._matcher(LLMatcher.grammar_from_regex(pattern), "the regular expression")

    def lark(self, grammar: str) -> Grammar:
        """Text of a Lark grammar's language."""
        from llguidance import LLMatcher

        return self._matcher(LLMatcher.grammar_from_lark(grammar), "the grammar")

    def _matcher(self, grammar: str, what: str) -> Grammar:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"{what} can't be used: {' '.join(matcher.get_error().split())[:300]}")
        return _Form(matcher, self._vocab_size, self._ends)

    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        if self._made is None:
            if not self._ends:
                raise UsageError("a form needs an end-of-text token, and the model has none")
            self._made = LLTokenizer(self._content, n_vocab=self._num_ids, eos_token=self._ends)
        return self._made


class _Form(Grammar):
    def __init__(self, matcher: Any, vocab_size: int, ends: list[int]) -> None:
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends

    def allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if not mask.any():  # a form that can't be gone on with
            mask[self._ends] = True
        return mask

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token)) and not self._matcher.is_stopped()
