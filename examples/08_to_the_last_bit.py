"""08  Why floating-point sums depend on the cut, and how to make them not.

    (a + b) + c  is not  a + (b + c)        each + rounds

Cut a sum of 100 terms over 2 ranks and it is (sum of 50) + (sum of 50); over 3 ranks, three other sums. The invariant
mode cuts every dim into the same num_blocks blocks on any number of ranks, deals whole blocks, and adds the blocks'
partial sums strictly from left to right, whichever rank holds them: the sequence of roundings is always the same.
"""

import numpy as np
from course import exercise, on_ranks, say, say_each

from mpitp.comm import Group
from mpitp.layers import choose_blocks, make_site
from mpitp.models import Batch, config_from_hf, new_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep

RANKS = 3
STEPS = 5
CONFIG = config_from_hf(
    {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "intermediate_size": 67,
        "max_position_embeddings": 16,
    }
)


def last_loss(group: Group, num_blocks: int) -> float:
    """The loss of the last of a few training steps in float32."""
    model = new_model(CONFIG, make_site(group, invariant_blocks=num_blocks), seed=8)
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()))
    tokens = np.random.default_rng(8).integers(0, CONFIG.vocab_size, (4, 17))
    batch = Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:])
    return [step([batch], lr=1e-2).loss for _ in range(STEPS)][-1]


def on_first(group: Group, size: int, num_blocks: int) -> float:
    """The same on the first `size` ranks of the group alone; the result on every rank."""
    sub = group.split(0 if group.rank < size else 1, group.rank)
    loss = last_loss(sub, num_blocks) if group.rank < size else 0.0
    return group.broadcast_object(loss)


def main(group: Group) -> None:
    big, one = np.float32(1e8), np.float32(1)
    say(group, f"float32: (1e8 - 1e8) + 1 = {(big - big) + one},  1e8 + (-1e8 + 1) = {big + (-big + one)}")

    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    for parts in (1, 2, 3):
        total = np.float32(sum(np.float32(piece.sum()) for piece in np.array_split(x, parts)))
        say(group, f"  100,000 numbers summed in {parts} piece{'s:' if parts > 1 else ': '} {total:.6f}  {bits(total)}")

    num_blocks = choose_blocks(invariant=True, blocks=0, heads=CONFIG.heads)
    say(group, f"\nThe invariant layout: {num_blocks} blocks of each dim, at any number of ranks; FFN columns:")
    blocks = make_site(group, invariant_blocks=num_blocks).share(CONFIG.ffn_hidden).blocks
    say_each(group, " ".join(f"{block.start}:{block.stop}" for block in blocks))

    say(group, f"\nloss after {STEPS} training steps, as a number and as its 64 bits")
    say(group, "ranks   plain layout                          invariant layout")
    found: dict[int, set[str]] = {0: set(), num_blocks: set()}
    for size in range(1, min(group.size, num_blocks) + 1):
        losses = {blocks: on_first(group, size, blocks) for blocks in found}
        say(group, f"{size:>3}  " + "  ".join(f"{loss:>17.14f} {bits(loss)}" for loss in losses.values()))
        for count, loss in losses.items():
            found[count].add(bits(loss))
    same = len(found[num_blocks]) == 1
    say(group, f"\n{'PROOF ' if same else 'WRONG '} the invariant layout gave {len(found[num_blocks])} different loss")
    say(group, f"       the plain layout gave {len(found[0])}")
    assert same

    exercise(
        group,
        "Set RANKS = 7: the table ends at 6. Why can't 7 ranks have this layout? Then give choose_blocks blocks=3 "
        "instead of 0: which bits change, and why must num_blocks never be chosen by the number of ranks?",
    )


def bits(x: float) -> str:
    """The bits of a floating-point number, in hexadecimal."""
    return np.asarray(x).tobytes()[::-1].hex()


if __name__ == "__main__":
    on_ranks(main, RANKS)
