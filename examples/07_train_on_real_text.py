"""07  Training on real text, on one rank and on several: the same losses.

    loss = mean over all characters of -log p(next character | those before)       nats a character

The text is the documentation that comes with Python (465,000 characters), the vocabulary the characters that occur in
it: about a hundred, which no number of ranks divides. Initial weights and batches depend on the seed alone, so the two
runs differ in nothing but the order in which partial sums are added, which is rounding.
"""

from pydoc_data.topics import topics

import numpy as np
from course import difference, exercise, on_ranks, prove, say

from mpitp.comm import Group, SerialGroup
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers import make_site
from mpitp.models import Batch, CausalLM, config_from_hf, new_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep

RANKS = 3
STEPS, BATCH, SEQ = 60, 4, 64
TEXT = "\n\n".join(topics[name] for name in sorted(topics))
CHARACTERS = sorted(set(TEXT))
PLACE = {character: i for i, character in enumerate(CHARACTERS)}
TOKENS = np.array([PLACE[character] for character in TEXT])
CONFIG = config_from_hf(
    {
        "model_type": "llama",
        "vocab_size": len(CHARACTERS),
        "hidden_size": 60,
        "num_attention_heads": 5,
        "num_hidden_layers": 2,
        "intermediate_size": 160,
        "max_position_embeddings": 128,
        "initializer_range": 0.08,
        "tie_word_embeddings": True,
    }
)


def batch_of(step: int) -> Batch:
    """The batch of a step: windows of the text, drawn by the step's number, the same on every rank."""
    starts = np.random.default_rng(step).integers(0, len(TOKENS) - SEQ - 1, BATCH)
    windows = np.stack([TOKENS[start : start + SEQ + 1] for start in starts])  # [b, s + 1]
    return Batch.of_rows(windows[:, :-1], targets=windows[:, 1:])


def train(group: Group) -> tuple[CausalLM, list[float]]:
    """A model trained on the ranks of `group`, and its losses."""
    model = new_model(CONFIG, make_site(group), seed=7)
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()), clip_norm=1.0)
    return model, [step([batch_of(i)], lr=8e-3 * min(1.0, (i + 1) / 10)).loss for i in range(STEPS)]


def main(group: Group) -> None:
    vocab, heads = len(CHARACTERS), CONFIG.heads
    say(group, f"{len(TEXT):,} characters, {vocab} different ones; a model of 2 blocks, {heads} heads")
    say(group, f"{STEPS} steps of {BATCH} x {SEQ} characters, float32\n")
    model, losses = train(group)
    _, alone = train(SerialGroup())

    say(group, f"step   1 rank    {group.size} ranks   difference")
    for i in [0, *range(9, STEPS, 10)]:
        bar = "#" * round(alone[i] * 8)
        say(group, f"{i + 1:>4} {alone[i]:8.5f} {losses[i]:10.5f} {losses[i] - alone[i]:12.1e}  {bar}")
    say(group)
    prove(group, f"losses of the first step on 1 and {group.size} ranks", (losses[0], alone[0]), limit=1e-5)
    prove(group, f"losses of all {STEPS} steps", (losses, alone), limit=2e-3)
    assert losses[-1] < losses[0] - 1.0, "it learns"
    assert difference(group, (losses, group.broadcast(np.array(losses)))) == 0.0, "every rank has the same losses"

    prompt = "The value of"
    done = generate(model, [[PLACE[c] for c in prompt]], 100, Sampling(temperature=0.6, seed=1))
    text = prompt + "".join(CHARACTERS[token] for token in done[0].tokens)
    say(group, f"\nwhat it writes by now:\n  {' '.join(text.split())[:76]}")

    exercise(
        group,
        'The difference starts at rounding (1e-7) and grows: why? Give make_site, on its line, dtype="float64" and '
        "predict the last column first.",
    )


if __name__ == "__main__":
    on_ranks(main, RANKS)
