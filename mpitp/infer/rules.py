"""What a model's files say about the texts that it makes of sources: the ids that begin and end them, and what may not
come. As transformers has it, generation_config.json says so, or where there is none config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitp.errors import ConfigError
from mpitp.infer.beams import BeamSettings
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.ends import GENERATION_CONFIG, ids_of

# What changes the tokens and isn't supported, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beam_groups": (1,),
    "renormalize_logits": (False,),
    "repetition_penalty": (1.0,),
    "sequence_bias": ({},),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """`start`: what the decoder is given first. `first`, `last`: ids that must come first, and where a text comes to
    its most tokens last; None: any. `banned`: ids that never come. `no_repeat`: no sequence of so many ids comes twice
    in a text, 0: any may.
    """

    start: int
    ends: tuple[int, ...] = ()
    first: int | None = None
    last: int | None = None
    banned: tuple[int, ...] = ()
    no_repeat: int = 0
    beams: BeamSettings = BeamSettings()

    def applied(self, scores: np.ndarray, text: Sequence[int], most: int) -> np.ndarray:
        """Scores [v] of what comes behind `text`, the start token not counted; -inf for what may not. `most`: tokens
        that a text may have.
        """
        forced = None if text else self.first
        if len(text) == most - 1 and self.last is not None:
            forced = self.last
        if forced is not None:
            only = np.full(scores.shape, -np.inf)
            only[forced] = 0.0
            return only
        excluded = [*self.banned, *self._repeating([self.start, *text])]
        if excluded:
            scores = scores.copy()
            scores[excluded] = -np.inf
        return scores

    def _repeating(self, text: Sequence[int]) -> list[int]:
        """The ids that would end a sequence of `no_repeat` ids that the text has already."""
        n = self.no_repeat
        if not n or len(text) < n - 1:
            return []
        newest = list(text[len(text) - n + 1 :])
        return [text[i + n - 1] for i in range(len(text) - n + 1) if list(text[i : i + n - 1]) == newest]


def read_rules(config: EncoderDecoderConfig, generation: Mapping[str, Any]) -> Rules:
    """The rules of a model; `generation`: its generation_config.json, {} where there is none.

    Raises ConfigError for what isn't supported and would change the tokens.
    """
    raw, where = (generation, GENERATION_CONFIG) if generation else (config.hf, "config.json")
    for key, neutral in _NEUTRAL.items():
        if raw.get(key) not in (None, *neutral):
            raise ConfigError(f"{where}: {key}={raw[key]!r:.60} is not supported; take it out to go without")
    start = _id(where, raw, "decoder_start_token_id", config)
    rules = Rules(
        start=config.start_id if start is None else start,
        ends=tuple(dict.fromkeys((*ids_of(where, raw.get("eos_token_id")), *config.eos_ids))),
        first=_id(where, raw, "forced_bos_token_id", config),
        last=_id(where, raw, "forced_eos_token_id", config),
        no_repeat=_count(where, raw, "no_repeat_ngram_size", 0),
        beams=_beams(where, raw),
    )
    rules = replace(rules, banned=tuple(token for token in _banned(where, raw) if token not in rules.ends))
    for token in (*rules.ends, *rules.banned):
        if not 0 <= token < config.vocab_size:
            raise ConfigError(f"{where}: id {token} is outside the vocabulary of {config.vocab_size}")
    return rules


def _id(where: str, raw: Mapping[str, Any], key: str, config: EncoderDecoderConfig) -> int | None:
    value = raw.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < config.vocab_size):
        raise ConfigError(f"{where}: {key}={value!r:.60} is not one of the {config.vocab_size} ids of the vocabulary")
    return value


def _count(where: str, raw: Mapping[str, Any], key: str, default: int) -> int:
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not int or value < 0:
        raise ConfigError(f"{where}: {key} must be a whole number of at least 0, got {value!r:.60}")
    return value


def _beams(where: str, raw: Mapping[str, Any]) -> BeamSettings:
    penalty, early = raw.get("length_penalty"), raw.get("early_stopping")
    penalty = 1.0 if penalty is None else penalty
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) < 1e3:
        raise ConfigError(f"{where}: length_penalty must be a number, got {penalty!r:.60}")
    if early not in (None, True, False, "never"):
        raise ConfigError(f'{where}: early_stopping must be true, false or "never", got {early!r:.60}')
    count = _count(where, raw, "num_beams", 1) or 1
    return BeamSettings(count, float(penalty), early or False)


def _banned(where: str, raw: Mapping[str, Any]) -> list[int]:
    """Single ids; sequences of several aren't supported."""
    words, suppressed = raw.get("bad_words_ids") or [], raw.get("suppress_tokens") or []
    lists = [*words, *([token] for token in suppressed)] if isinstance(words, list) else [words]
    for word in lists:
        if not isinstance(word, list) or len(word) != 1 or type(word[0]) is not int:
            raise ConfigError(f"{where}: {word!r:.60} is not supported: what never comes must be single ids")
    return [word[0] for word in lists]
