"""Fifty AdamW steps and two texts of a tiny model in invariant mode: what every rank count must give alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpitp.comm import Group, SerialGroup
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers.passes import DropoutState
from mpitp.layers.site import make_site
from mpitp.models import Batch, DecoderConfig, config_from_hf, new_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep
from tests.models.model_cases import GPT2, LLAMA
from tests.sharded import weights

Arrays = dict[str, Any]
STEPS, BLOCKS = 50, 6
CONFIGS: dict[str, DecoderConfig] = {  # odd widths and vocabularies, 6 heads, dropout in both
    "gpt2": config_from_hf(GPT2),
    "llama 6/2": config_from_hf(
        {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 11, "attention_dropout": 0.1}
    ),
}


def batch(config: DecoderConfig, step: int) -> Batch:
    """Two sequences that go up by a fixed number, so that there is something to learn."""
    starts = np.random.default_rng(step).integers(0, config.vocab_size, (2, 1))
    rows = (starts + 3 * np.arange(8)) % config.vocab_size
    return Batch.of_rows(rows[:, :-1], rows[:, 1:], DropoutState(1, step))


def train_and_generate(group: Group, name: str, steps: int = STEPS) -> Arrays:
    """Losses and gradient norms of all steps, the weights after them, a greedy and a sampled text."""
    model = new_model(CONFIGS[name], make_site(group, invariant_blocks=BLOCKS), seed=3)
    optimizer = AdamW(model.named_params(), AdamWSettings())
    step = TrainStep(model, optimizer, clip_norm=1.0)
    done = [step([batch(model.config, i)], 1e-2) for i in range(1, steps + 1)]
    result: Arrays = {"losses": np.array([r.loss for r in done]), "norms": np.array([r.grad_norm for r in done])}
    result |= {f"weight {key}": value for key, value in weights(group, model.named_params()).items()}
    for key, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=0.9, top_k=30, seed=5))):
        texts = generate(model, [[1, 4, 7], [9]], 12, sampling, eos_ids=())
        result[key] = np.array([text.tokens for text in texts])
    return result


@cache
def on_one_rank(name: str, steps: int = STEPS) -> Arrays:
    """The result of the one-rank model."""
    return train_and_generate(SerialGroup(), name, steps)
