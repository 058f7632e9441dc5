"""The tokens that end a text: the files of a model may name different ones, and each of them ends it.

A fine-tuned chat model ends its turns with a token that often one file alone knows. Were only one file believed, such a
model would never stop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import DecoderConfig

GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "the tokenizer"
GROW = "mpitp convert --resize-vocabulary DIR NEW_DIR gives its added tokens rows"


def ids_of(where: str, value: Any) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: one, several or none (null). Raises ConfigError for what is no id."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int:
            raise ConfigError(f"{where}: eos_token_id must be made of whole numbers, got {token!r:.60}")
    return tuple(ids)


def check_bos(where: str, value: Any, config: DecoderConfig) -> None:
    """Raise ConfigError for a `bos_token_id` that is neither null nor an id of the vocabulary."""
    if value is not None and (type(value) is not int or not 0 <= value < config.vocab_size):
        raise ConfigError(
            f"{where}: bos_token_id={value!r:.60} is not one of the {config.vocab_size} ids of the vocabulary"
        )


def with_ends(config: DecoderConfig, source: str, ids: Iterable[int]) -> DecoderConfig:
    """The config with the ends that `source` names beside those of its own; what is written then has all of them.

    Raises ConfigError for an id outside the vocabulary.
    """
    given = tuple(dict.fromkeys(ids))
    for token in given:
        if not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"{source}: the end-of-text id {token} is outside the vocabulary of {config.vocab_size} (0 to "
                f"{config.vocab_size - 1})" + (f"; {GROW}" if source == TOKENIZER else "")
            )
    if not given:
        return config
    ends = config.ends or ((("config.json", config.eos_ids),) if config.eos_ids else ())
    union = tuple(dict.fromkeys((*config.eos_ids, *given)))
    hf = {**config.hf, "eos_token_id": union[0] if len(union) == 1 else list(union)}
    return dataclasses.replace(config, eos_ids=union, ends=(*ends, (source, given)), hf=hf)


def notices_of(config: DecoderConfig) -> list[str]:
    """What a program says, once, about the model that it has read."""
    return [*config.notices, *filter(None, [_difference(config)])]


def _difference(config: DecoderConfig) -> str | None:
    """A line about files that name different ends. A tokenizer can name one only."""
    union = set(config.eos_ids)
    if all(set(ids) == union or (source == TOKENIZER and union.issuperset(ids)) for source, ids in config.ends):
        return None
    told = "; ".join(f"{source} names {', '.join(map(str, ids))}" for source, ids in config.ends)
    return f"the ends of text differ: {told}; each of them ends a text"
