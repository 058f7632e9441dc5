"""A verification of a small model in any layout: mesh, token shards, ZeRO, schedule, recompute."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from mpitp.comm import Group, make_mesh, run_threads
from mpitp.layers.gathered import deal_weights
from mpitp.layers.passes import DropoutState
from mpitp.layers.site import Site, make_site
from mpitp.models import CausalLM, build_model
from mpitp.models.registry import recompute_blocks
from mpitp.models.runner import PlainRunner
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import make_reduction
from mpitp.pipeline.runner import PipelineRunner
from mpitp.train.step import TrainStep
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import Report, Settings, verify
from tests.models.model_cases import make_batch
from tests.sharded import fill
from tests.verify.cases import CONFIGS


def run_layout(
    model: str,
    mesh: Mapping[str, int],
    site: Mapping[str, Any],
    *,
    steps: int = 0,
    rows: int = 1,
    zero: int = 0,
    schedule: str = "1f1b",
    recompute: str = "none",
) -> Report:
    """Rank 0's report of four microbatches of `rows` sequences; `site`: options of the site."""
    config = CONFIGS[model]
    firsts = range(0, 4 * rows, rows)
    batches = [make_batch(config, rows, DropoutState(5, 1), i, range(i, i + rows)) for i in firsts]
    settings = Settings(default_tolerance("float64", is_exact=False), steps)

    def make(where: Site) -> CausalLM:
        made = recompute_blocks(build_model(config, where), recompute)
        is_layout = where.ranks.size > 1
        if is_layout and zero == 3:
            deal_weights(made.layers, where.mesh)
        fill(made.named_params(), std=0.2)
        return made

    def make_step(made: CausalLM, adam: AdamWSettings, clip_norm: float) -> TrainStep:
        reduction = WithDealtWeights(made) if zero == 3 else make_reduction(made, zero)
        optimizer, is_cut = AdamW(reduction.params, adam, made.dtype), made.site.mesh.sizes["pp"] > 1
        runner = PipelineRunner(made, schedule, reduction) if is_cut else PlainRunner(made, reduction)
        return TrainStep(made, optimizer, clip_norm, None, runner, reduction)

    def run(group: Group) -> Report:
        where = make_site(make_mesh(group, mesh), dtype="float64", **site)
        return verify(where, make, batches, settings, make_step)

    return run_threads(prod(mesh.values()), run)[0]
