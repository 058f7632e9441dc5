"""Two small models with dropout everywhere, and a verification of one on thread ranks."""

from __future__ import annotations

import dataclasses

from mpitp.comm import Group, run_threads
from mpitp.models import CausalLM, DecoderConfig, config_from_hf
from mpitp.models.config import Dropouts
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import Report, Settings, verify
from mpitp.verify.source import random_batch
from tests.models.model_cases import GPT2, LLAMA
from tests.models.model_cases import make_model as filled_model

DROPOUTS = Dropouts(embedding=0.1, attention=0.2, residual=0.15)
CONFIGS: dict[str, DecoderConfig] = {
    "gpt2": dataclasses.replace(config_from_hf(GPT2), dropouts=DROPOUTS),
    "llama": dataclasses.replace(config_from_hf({**LLAMA, "head_dim": 4}), dropouts=DROPOUTS),  # 9 heads, 3 KV heads
}


def run_verify(model: str, ranks: int, steps: int = 0, dtype: str = "float64", blocks: int = 0) -> Report:
    """Rank 0's report, with the tolerance that the command has."""
    batch = random_batch(CONFIGS[model], batch=3, seq=7, seed=1)
    settings = Settings(default_tolerance(dtype, is_exact=bool(blocks)), steps)

    def make(group: Group) -> CausalLM:
        return filled_model(group, CONFIGS[model], dtype, invariant_blocks=blocks)

    return run_threads(ranks, verify, make, batch, settings)[0]
