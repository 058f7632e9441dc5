"""Two small models with dropout everywhere, and a verification of one on thread ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpitp.comm import Group, make_mesh, run_threads
from mpitp.layers.site import Site, make_site
from mpitp.models import Batch, CausalLM, DecoderConfig, build_model, config_from_hf
from mpitp.models.config import Dropouts
from mpitp.verify.batches import random_batch
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import Report, Settings, verify
from tests.models.model_cases import GPT2, LLAMA, MIXTURE_RAW
from tests.sharded import fill

DROPOUTS = Dropouts(embedding=0.1, attention=0.2, residual=0.15)
CONFIGS: dict[str, DecoderConfig] = {
    "gpt2": dataclasses.replace(config_from_hf(GPT2), dropouts=DROPOUTS),
    "mixtral": config_from_hf({**MIXTURE_RAW["mixtral"], "head_dim": 4}),
    "llama": dataclasses.replace(config_from_hf({**LLAMA, "head_dim": 4}), dropouts=DROPOUTS),  # 9 heads, 3 KV heads
}


def run_verify(
    model: str,
    ranks: int,
    steps: int = 0,
    dtype: str = "float64",
    blocks: int = 0,
    mesh: Mapping[str, int] | None = None,
    batch: Batch | None = None,
    **options: Any,
) -> Report:
    """Rank 0's report, with the tolerance that the command has. `options`: of the site."""
    batch = random_batch(CONFIGS[model], batch=3, seq=7, seed=1) if batch is None else batch
    settings = Settings(default_tolerance(dtype, is_exact=bool(blocks)), steps)

    def make(site: Site) -> CausalLM:
        made = build_model(CONFIGS[model], site)
        fill(made.named_params(), std=0.2)
        return made

    def run(group: Group) -> Report:
        site = make_site(make_mesh(group, mesh), dtype=dtype, invariant_blocks=blocks, **options)
        return verify(site, make, batch, settings)

    return run_threads(ranks, run)[0]
