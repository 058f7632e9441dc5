"""Tokens that only the files beside tokenizer.json declare, given to the tokenizer so that none is cut to pieces.

transformers reads three places beside tokenizer.json's own `added_tokens`: `added_tokens_decoder` of
tokenizer_config.json (id: token), added_tokens.json (text: id), and the special tokens by role (`eos_token`, ...,
`additional_special_tokens`). An id that isn't what the library gives is an error: the text would become other tokens
than those the model was trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mpitp.errors import FileError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_SETTINGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def check_own_tokens(backend: Tokenizer, tokens: Sequence[Mapping[str, Any]] | None, where: str) -> None:
    """Refuse a tokenizer.json whose `added_tokens`, these, have other ids than the library gives them."""
    for token in tokens or []:
        _check_id(backend, token["content"], token["id"], f"{where}/tokenizer.json")


def add_declared_tokens(
    backend: Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any], special: Mapping[str, Any], where: str
) -> None:
    """Add what tokenizer_config.json and added_tokens.json declare. special: the roles, from whichever file."""
    special_texts = [text for text, _ in _special_tokens(special, where)]
    declared = [*_from_decoder(config, where), *_from_added(added, special_texts, where)]
    for token_id, token, source in sorted(declared, key=lambda one: one[0]):
        if token.content not in {known.content for known in backend.get_added_tokens_decoder().values()}:
            backend.add_tokens([token])
        _check_id(backend, token.content, token_id, source)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text, may_be_new in _special_tokens(special, where):
        if text not in known and (may_be_new or backend.token_to_id(text) is not None):
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def token_text(token: Any) -> Any:
    """A special token's text, given as it is or as an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _from_decoder(config: Mapping[str, Any], where: str) -> Iterator[tuple[int, AddedToken, str]]:
    source = f"{where}/tokenizer_config.json"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise FileError(f"{source}: added_tokens_decoder must map ids to tokens")
    for key, entry in decoder.items():
        text = token_text(entry)
        if not (key.isascii() and key.isdigit() and isinstance(text, str) and text):
            raise FileError(
                f"{source}: added_tokens_decoder must map ids to tokens, but has {key!r:.40}: {entry!r:.60}"
            )
        settings = entry if isinstance(entry, dict) else {}
        flags = {name: settings[name] for name in _SETTINGS if isinstance(settings.get(name), bool)}
        yield _id(key, source), AddedToken(text, **flags), source


def _from_added(
    added: Mapping[str, Any], special_texts: list[str], where: str
) -> Iterator[tuple[int, AddedToken, str]]:
    source = f"{where}/added_tokens.json"
    for text, token_id in added.items():
        if type(token_id) is not int or not text:
            raise FileError(f"{source} must map tokens to ids, but has {text!r:.40}: {token_id!r:.60}")
        yield token_id, AddedToken(text, normalized=False, special=text in special_texts), source


def _special_tokens(special: Mapping[str, Any], where: str) -> Iterator[tuple[str, bool]]:
    """(text, whether it may be new to the vocabulary) of every special token that is declared by its role."""
    for role in ROLES:
        text = token_text(special.get(role))
        if (text is not None or special.get(role) is not None) and (not isinstance(text, str) or not text):
            raise FileError(f"{where}: {role} must be a token's text, got {text!r:.60}")
        if text is not None:
            yield text, False
    for role in MORE_SPECIAL:
        several = special.get(role) or []
        for token in several.values() if isinstance(several, dict) else several if isinstance(several, list) else []:
            text = token_text(token)
            if isinstance(text, str) and text:
                yield text, True


def _id(key: str, source: str) -> int:
    if len(key) > 9:
        raise FileError(f"{source}: the token id {key:.40} is beyond any vocabulary")
    return int(key)


def _check_id(backend: Tokenizer, text: str, token_id: int, source: str) -> None:
    given = backend.token_to_id(text)
    if given != token_id:
        raise FileError(
            f"{source}: the token {text!r:.60} has the id {token_id}, but with tokenizer.json its id is {given}; the "
            "files are of different tokenizers, or an id between them is missing: save them again in one go"
        )
