"""The facts of a model with an encoder and a decoder (T5; BART and Marian)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import MOST, MOST_ELEMENTS, MOST_INIT_STD, MOST_OF_ANY, HfConfigReader

LEARNED, SINES, RELATIVE = "learned", "sines", "relative"  # how positions are told apart

# Keys that the reference reads, and the values with which they change nothing.
ENCODER_DECODER_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "compression_config": ({},),
    "decoder_layerdrop": (0.0,),
    "encoder_layerdrop": (0.0,),
    "is_decoder": (False,),
    "is_encoder_decoder": (True,),
    "pruned_heads": ({},),
    "quantization_config": ({},),
}


@dataclass(frozen=True, slots=True)
class Side:
    """What encoder and decoder may have different sizes of."""

    num_layers: int
    heads: int
    head_dim: int
    ffn_hidden: int


@dataclass(frozen=True, slots=True)
class PairDropouts:
    """Dropout rates: of what goes into the blocks (and, with norms before branches, comes out of them), of attention's
    probabilities, of the residual branches, and of the MLPs' inner columns.
    """

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0
    inner: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig:
    """An encoder with a decoder; sizes in the glossary's terms. `hf` is the config.json it was read from.

    `is_pre_norm`: RMS norms before the branches, no biases (T5), else LayerNorms behind them, with biases. `positions`:
    LEARNED (behind `position_offset` rows that none uses), SINES, or RELATIVE (in `num_buckets` up to `furthest`).
    `max_positions`: 0 where no length is too long. `start_id`: what a target begins with in the decoder. `held_id`: the
    id whose row lookups don't train (BART's padding).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    encoder: Side
    decoder: Side
    is_pre_norm: bool
    positions: str
    max_positions: int
    norm_eps: float
    activation: str
    init_std: float
    start_id: int
    tied: bool = True
    is_gated: bool = False
    position_offset: int = 0
    num_buckets: int = 0
    furthest: int = 0
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    logits_scale: float = 1.0
    logits_bias: bool = False
    dropouts: PairDropouts = PairDropouts()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    held_id: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # fact: key of config.json
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)
    unread: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.positions == RELATIVE and not 4 <= self.num_buckets < 2 * self.furthest <= MOST_OF_ANY:
            raise ConfigError(
                f"config.json: {self.key('num_buckets')}={self.num_buckets} must be at least 4, and below twice "
                f"{self.key('furthest')}={self.furthest}"
            )
        if not 0 <= self.norm_eps <= 1:
            raise ConfigError(f"config.json: {self.key('norm_eps')} must lie in [0, 1], got {self.norm_eps}")
        if not 0 <= self.init_std <= MOST_INIT_STD:
            raise ConfigError(f"config.json: initial weights must have a deviation in [0, {MOST_INIT_STD}]")
        for what, ids in (("eos_token_id", self.eos_ids), ("decoder_start_token_id", (self.start_id,))):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(
                        f"config.json: {what}={token!r:.40} is outside the vocabulary of {self.vocab_size}; expected 0 "
                        f"to {self.vocab_size - 1}"
                    )

    def _check_sizes(self) -> None:
        sizes = {name: getattr(self, name) for name in ("vocab_size", "hidden_size")}
        for side, own in (("encoder", self.encoder), ("decoder", self.decoder)):
            sizes |= {f"{side}.{name}": getattr(own, name) for name in Side.__slots__}
        for name, value in sizes.items():
            most = MOST.get(name.rpartition(".")[2], MOST_OF_ANY)
            if not 1 <= value <= most:
                raise ConfigError(f"config.json: {self.key(name)} must lie in 1 .. {most}, got {value!r:.40}")
        if not 0 <= self.max_positions <= MOST_OF_ANY:
            raise ConfigError(f"config.json: {self.key('max_positions')} must be at least 1, got {self.max_positions}")
        sides = (self.encoder, self.decoder)
        widths = [width for side in sides for width in (side.ffn_hidden, side.heads * side.head_dim)]
        if max(self.vocab_size, self.max_positions, *widths) * self.hidden_size > MOST_ELEMENTS:
            raise ConfigError("config.json: its sizes make a matrix beyond any memory")

    @property
    def heads(self) -> int:
        """Of the side that has fewer: what limits the blocks of an invariant layout."""
        return min(self.encoder.heads, self.decoder.heads)

    @property
    def head_dim(self) -> int:
        """Of the side that has narrower ones."""
        return min(self.encoder.head_dim, self.decoder.head_dim)

    def key(self, fact: str) -> str:
        """What config.json calls one of these fields."""
        return self.keys.get(fact, fact)


def expect_class(read: HfConfigReader, expected: str) -> None:
    """Refuse a file whose first architecture isn't the one with the language-model head."""
    given = read.raw.get("architectures") or [expected]
    if not isinstance(given, list) or given[0] != expected:
        raise ConfigError(
            f"config.json: architectures {given!r:.80} is not supported for model_type {read.model_type!r}; supported: "
            f"{expected}"
        )
