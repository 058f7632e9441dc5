"""The facts of an encoder (BERT and its kin), and which head is on it.

A directory's `architectures` say what its head is: none (features), masked language modelling, or classes of whole
texts or of tokens. The classes' names are `id2label`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import MOST, MOST_ELEMENTS, MOST_INIT_STD, MOST_OF_ANY, Dropouts, HfConfigReader

FEATURES, MASKED, CLASSIFICATION, TOKENS = "features", "masked", "classification", "tokens"
MOST_LABELS = 100_000

# Keys that an encoder's reference reads, and the values with which they change nothing.
ENCODER_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "compression_config": ({},),
    "is_causal": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({},),
    "quantization_config": ({},),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """An encoder; sizes in the glossary's terms. `hf` is the config.json it was read from.

    `position_offset`: rows of the position table before the first position's. `num_types`: kinds of tokens (0: no such
    table). `head_activation`: of the masked head's dense layer, where it isn't the blocks' own. `labels`: names of the
    classes, where the head has some.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    ffn_hidden: int
    max_positions: int
    norm_eps: float
    activation: str
    init_std: float
    position_offset: int = 0
    num_types: int = 0
    dropouts: Dropouts = Dropouts()
    head: str = FEATURES
    head_dropout: float = 0.0
    head_activation: str | None = None
    labels: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # fact: key of config.json
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)
    unread: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "heads", "ffn_hidden", "max_positions"):
            value, most = getattr(self, name), MOST.get(name, MOST_OF_ANY)
            if not 1 <= value <= most:
                raise ConfigError(f"config.json: {self.key(name)} must lie in 1 .. {most}, got {value!r:.40}")
        for name in ("vocab_size", "ffn_hidden", "max_positions", "hidden_size"):
            if getattr(self, name) * self.hidden_size > MOST_ELEMENTS:
                raise ConfigError(
                    f"config.json: {self.key(name)}={getattr(self, name)} makes a matrix beyond any memory"
                )
        if self.hidden_size % self.heads:
            raise ConfigError(
                f"config.json: {self.key('hidden_size')}={self.hidden_size} must be a multiple of "
                f"{self.key('heads')}={self.heads}"
            )
        if not 0 <= self.norm_eps <= 1:
            raise ConfigError(f"config.json: {self.key('norm_eps')} must lie in [0, 1], got {self.norm_eps}")
        if not 0 <= self.init_std <= MOST_INIT_STD:
            raise ConfigError(f"config.json: initializer_range must lie in [0, {MOST_INIT_STD}], got {self.init_std}")
        if not 0 <= self.num_types <= MOST_OF_ANY or not 0 <= self.position_offset <= MOST_OF_ANY:
            raise ConfigError("config.json: type_vocab_size and pad_token_id must be at least 0")
        if self.head in (CLASSIFICATION, TOKENS) and len(self.labels) < 2:
            raise ConfigError(
                f"config.json: a classifier of {len(self.labels)} classes is not supported; expected at least 2 "
                "(one is a regression)"
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.heads

    @property
    def kv_heads(self) -> int:
        """As many as query heads."""
        return self.heads

    @property
    def num_classes(self) -> int:
        """What a target is one of; 0 where there is no head."""
        return {FEATURES: 0, MASKED: self.vocab_size}.get(self.head, len(self.labels))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """An encoder goes on with nothing, so nothing ends a text."""
        return ()

    @property
    def bos_id(self) -> int | None:
        """None: the tokenizer puts around a text what the model was made with."""
        return None

    def key(self, fact: str) -> str:
        """What config.json calls one of these fields."""
        return self.keys.get(fact, fact)

    def with_head(self, head: str, labels: Sequence[str] = ()) -> EncoderConfig:
        """The same encoder under another head; its config.json says so."""
        from mpitp.models.encoders import ENCODER_TYPES

        hf = {**self.hf, "architectures": [ENCODER_TYPES[self.model_type].classes[head]]}
        if labels:
            named = list(labels)
            hf = {key: value for key, value in hf.items() if key not in ("num_labels", "problem_type")}
            hf |= {"id2label": {str(i): name for i, name in enumerate(named)}}
            hf |= {"label2id": {name: i for i, name in enumerate(named)}}
        return dataclasses.replace(self, head=head, labels=tuple(labels), hf=hf)


def read_head(read: HfConfigReader, classes: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Which head the file's `architectures` name; a file that names none is one of features.

    classes: head to class. others: more classes, with the head that they are read as.
    """
    given = read.raw.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"config.json: architectures must be a list of words, got {given!r:.60}")
    known = {name: head for head, name in classes.items()} | dict(others)
    if given and given[0] not in known:
        raise ConfigError(
            f"config.json: architectures {given[0]!r:.60} is not supported for model_type {read.model_type!r}; "
            f"supported: {', '.join(known)}"
        )
    return known[given[0]] if given else FEATURES


def read_labels(read: HfConfigReader, head: str) -> tuple[str, ...]:
    """The classes' names; () for a head without classes. `num_labels` overrules an `id2label` of another length."""
    named, count = read.mapping("id2label"), read.integer("num_labels", 0)
    if head not in (CLASSIFICATION, TOKENS):
        return ()
    if head == CLASSIFICATION:
        read.expect("problem_type", (None, "single_label_classification"), None)
    if not 0 <= count <= MOST_LABELS or len(named or ()) > MOST_LABELS:
        raise ConfigError(f"config.json: more than {MOST_LABELS} classes, or fewer than 0")
    if named is None or (count and len(named) != count):
        return tuple(f"LABEL_{i}" for i in range(count or 2))
    numbers = [str(i) for i in range(len(named))]
    if set(named) != set(numbers) or not all(isinstance(name, str) for name in named.values()):
        raise ConfigError('config.json: id2label must name the classes "0", "1", ... by words')
    return tuple(named[i] for i in numbers)
