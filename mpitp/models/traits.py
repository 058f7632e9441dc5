"""What only some types of decoders have; the neutral value of each is that of a Llama."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitp.models.mixture import Mixture


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of a `DecoderConfig` that few types read from their files.

    activation: of the MLP, as `layers/activation.py` calls it ("": the type's own).
    rotary_width: columns of a head that RoPE turns; 0: all.
    unrotated: blocks without RoPE.
    windows: how many of the newest positions each block sees, itself among them; 0: all. (): all see all.
    local_blocks: blocks whose RoPE has the base local_theta and the scaling local_scaling, not those of the others.
    score_scales: what each block's scores are multiplied by. (): 1 / sqrt(head_dim).
    score_cap, logit_cap: scores and logits go through cap tanh(x / cap); 0: they don't.
    embedding_scale: what embeddings are multiplied by.
    embedding_norm: whether they are normalised.
    alibi: whether scores fall with the distance, by a slope of each head's own, in place of positions.
    position_offset: rows of the table of learned positions in front of the first position's.
    parallel: whether attention and MLP read the same input side by side.
    head_norms, joint_norms: whether q and k are normalised, head by head or over all heads together.
    mixture: the blocks that have experts in the place of an MLP.
    """

    activation: str = ""
    rotary_width: int = 0
    unrotated: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    local_blocks: tuple[int, ...] = ()
    local_theta: float = 0.0
    local_scaling: dict[str, Any] | None = None
    score_scales: tuple[float, ...] = ()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    alibi: bool = False
    position_offset: int = 0
    parallel: bool = False
    head_norms: bool = False
    joint_norms: bool = False
    mixture: Mixture | None = None

    def of_blocks(self, blocks: range) -> Traits:
        """Those of a model of these blocks alone."""
        return replace(
            self,
            unrotated=tuple(block - blocks.start for block in self.unrotated if block in blocks),
            local_blocks=tuple(block - blocks.start for block in self.local_blocks if block in blocks),
            windows=self.windows[blocks.start : blocks.stop],
            mixture=None if self.mixture is None else self.mixture.of_blocks(blocks),
            score_scales=self.score_scales[blocks.start : blocks.stop],
        )

    def score_scale(self, block: int) -> float | None:
        """What a block's scores are multiplied by; None: 1 / sqrt(head_dim)."""
        return self.score_scales[block] if self.score_scales else None

    def window(self, block: int) -> int:
        """How many of the newest positions a block sees; 0: all."""
        return self.windows[block] if self.windows else 0
