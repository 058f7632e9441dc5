r"""What a training step hands to the collectives, in closed form.

With t tokens, width h, L blocks and w bytes a number, every rank of a tensor-parallel group of p > 1 takes part in

    embedding        1 sum  of t h w                              forward
    blocks           2 L    of t h w forward (attention, MLP), 2 L of t h w backward; over nodes, where sums run behind
                            products, those forward may come in pieces
    head             1      of t h w backward
    loss             1 maximum of t w and 1 sum of 2 t w          forward
    KV gradients     L      of 2 t d w for every KV head that several ranks hold   backward
    gradient norm    1      of 8 bytes for every block of every parameter part
    agreement        1 broadcast of 16 bytes (loss and norm)

a step of one microbatch. "Bytes" are those of the array that a rank hands over; what a library puts on the wire for it
is its own affair (a ring moves 2 (p - 1) / p of it each way).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitp.layers.partition import share_heads
from mpitp.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind in a step: how many, and the bytes a rank hands to them in all."""

    what: str
    calls: int
    total_bytes: int


def step_traffic(
    config: DecoderConfig, ranks: int, tokens: int, itemsize: int, num_blocks: int = 0, pieces: int = 1
) -> list[Traffic]:
    """The traffic of one step of one microbatch on each rank; empty for one rank. `pieces`: of a forward sum."""
    if ranks == 1:
        return []
    activation, layers = tokens * config.hidden_size * itemsize, config.num_layers
    shared = len(share_heads(config.heads, config.kv_heads, 0, ranks, num_blocks).kv_shared)
    rows = [
        Traffic("embedding", 1, activation),
        Traffic("blocks forward", 2 * layers * pieces, 2 * layers * activation),
        Traffic("blocks backward", 2 * layers, 2 * layers * activation),
        Traffic("head backward", 1, activation),
        Traffic("loss", 2, 3 * tokens * itemsize),
        Traffic("KV gradients", layers * shared, layers * shared * 2 * tokens * config.head_dim * itemsize),
        Traffic("gradient norm", 1, 8 * norm_slots(config, num_blocks or ranks)),
        Traffic("agreement", 1, 16),
    ]
    return [row for row in rows if row.calls]


def norm_slots(config: DecoderConfig, blocks: int) -> int:
    """Numbers in the gradient norm's vector: one for each block of each part of each parameter.

    A dimension is cut into `blocks` blocks, or as many as it has units; k and v are always cut by KV heads, and what is
    replicated is one block.
    """
    heads, ffn, vocab = (min(units, blocks) for units in (config.heads, config.ffn_hidden, config.vocab_size))
    is_gpt2 = config.model_type == "gpt2"
    norm = 2 if is_gpt2 else 1  # weight and bias, or weight alone
    qkv = (heads + 2 * config.kv_heads) * (1 + config.qkv_bias)
    up = ffn * (1 if is_gpt2 else 2) * (1 + config.mlp_bias)  # up, or gate and up
    block = 2 * norm + qkv + heads + config.out_bias + up + ffn + config.mlp_bias
    tables = vocab * (1 if config.tied else 2) + (0 if config.rope_theta else 1)
    return tables + config.num_layers * block + norm
