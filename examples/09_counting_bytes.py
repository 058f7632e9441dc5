"""09  Counting bytes: what a training step hands to collectives, in a ledger and in closed form.

    t h (4 L + 2)        activations: two all-reduces a block each way, the embedding, the head's dx
    + 3 t                the loss: maximum, denominator, target's logit of every token
    + 2 t d S L          dk and dv of the S KV heads that live on several ranks

numbers for t tokens, width h, L blocks, head dim d; the vocabulary doesn't enter. A ring moves 2 (p - 1) / p times that
over each rank's link. The ledger is a group that stands before the real one; the layers don't know it is there.
"""

from collections import Counter

import numpy as np
from course import Watched, exercise, nbytes, on_ranks, say

from mpitp.comm import Group
from mpitp.layers import make_site
from mpitp.layers.partition import share_heads
from mpitp.models import Batch, DecoderConfig, config_from_hf, new_model

RANKS = 3
BATCH, SEQ = 2, 16


def llama(heads: int, kv_heads: int, blocks: int) -> DecoderConfig:
    """A small model with heads 4 wide."""
    return config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 97,
            "hidden_size": 24,
            "head_dim": 4,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": blocks,
            "intermediate_size": 40,
            "max_position_embeddings": SEQ,
        }
    )


def formula(config: DecoderConfig, ranks: int, tokens: int) -> dict[tuple[int, ...], tuple[int, str]]:
    """For the shape of each array that is reduced: how often in a step, and what it is."""
    shared = len(share_heads(config.heads, config.kv_heads, 0, ranks).kv_shared)
    rows: dict[tuple[int, ...], tuple[int, str]] = {
        (tokens, config.hidden_size): (4 * config.num_layers + 2, "activations"),
        (tokens,): (1, "loss: maxima"),
        (2, tokens): (1, "loss: sums"),
        (2, tokens, config.head_dim): (shared * config.num_layers, "dk and dv"),
    }
    return {shape: row for shape, row in rows.items() if row[0]}


def ledger(config: DecoderConfig, group: Group) -> list:
    """Every collective of one forward and backward pass."""
    watched = Watched(group)
    model = new_model(config, make_site(watched), seed=9)
    tokens = np.random.default_rng(9).integers(0, config.vocab_size, (BATCH, SEQ + 1))
    batch = Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:])
    watched.calls.clear()
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, scale=1 / batch.num_targets)
    return watched.calls


def main(group: Group) -> None:
    tokens, p = BATCH * SEQ, group.size
    for config in (llama(6, 6, 2), llama(6, 2, 3), llama(9, 1, 1)):
        calls = ledger(config, group)
        counted, expected = Counter(call.shape for call in calls), formula(config, p, tokens)
        say(group, f"heads {config.heads}, KV heads {config.kv_heads}, blocks {config.num_layers}; {p} ranks")
        say(group, f"  {'':<16}{'shape':<16}{'calls':>6}{'formula':>9}{'bytes':>9}")
        for shape, (times, name) in expected.items():
            size = counted[shape] * int(np.prod(shape)) * 4
            say(group, f"  {name:<16}{list(shape)!s:<16}{counted[shape]:>6}{times:>9}{size:>9,}")
        total, closed = sum(map(nbytes, calls)), sum(int(np.prod(s)) * times * 4 for s, (times, _) in expected.items())
        same = counted == {shape: times for shape, (times, _) in expected.items()} and total == closed
        say(group, f"{'PROOF ' if same else 'WRONG '} ledger {total:,} bytes a rank, formula {closed:,} bytes")
        say(group, f"       over the link in a ring: 2 (p - 1) / p times that, {2 * (p - 1) / p * total:,.0f}\n")
        assert same

    large = 4 * 8192 * 4096 * (4 * 32 + 2)
    say(group, f"The first term for h 4096, 32 blocks (8 billion weights), 8192 tokens: {large / 1e9:.1f} GB")
    exercise(
        group,
        "Which term grows when RANKS = 5 instead of 3, and which stay? Predict the calls for dk and dv in each of the "
        "three models, then change the number.",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
