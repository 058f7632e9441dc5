"""One step of a small model in any layout, for the game of planted faults: what `verify` says of it, what is sent.

Four microbatches on a mesh, with token shards, ZeRO, a schedule and recomputation as a fault wants them; the oracle is
the same model on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

import mpitp.verify.run
from examples.planted_bugs import GPT2, LLAMA
from examples.planted_layout_bugs import LayoutFault
from examples.planted_mixture_bugs import MIXTRAL
from mpitp.comm import Group, make_mesh, run_threads
from mpitp.comm.observed import GroupObserver, ObservedGroup
from mpitp.layers import Site, make_site
from mpitp.layers.gathered import deal_weights
from mpitp.layers.passes import DropoutState
from mpitp.models import Batch, CausalLM, config_from_hf, new_model
from mpitp.models.config import Dropouts
from mpitp.models.registry import recompute_blocks
from mpitp.models.runner import PlainRunner
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import make_reduction
from mpitp.pipeline.runner import PipelineRunner
from mpitp.train.step import TrainStep
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import Report, Settings, deal, verify
from mpitp.verify.source import shake

MICROBATCHES, LENGTH = 4, 7
DROPOUTS = Dropouts(embedding=0.1, attention=0.2, residual=0.15)
MODELS = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL}


def layout_in_words(fault: LayoutFault) -> str:
    """Where it is planted: "gpt2, dp 2 x tp 2, token shards, zero 2"."""
    words = [fault.model, " x ".join(f"{axis} {size}" for axis, size in fault.mesh.items())]
    words += ["token shards"] * fault.site.get("sequence_parallel", False)
    return ", ".join([*words, *(f"{name} {value}" for name, value in fault.training.items() if name != "rows")])


def batches_of(fault: LayoutFault) -> list[Batch]:
    """Four microbatches; of every sequence but the first of five some targets don't count."""
    rows, random = fault.training.get("rows", 1), np.random.default_rng(12)
    tokens = random.integers(0, 53, (MICROBATCHES * rows, LENGTH + 1))
    targets = np.where(np.arange(LENGTH) < np.arange(len(tokens))[:, None] % 5, -1, tokens[:, 1:])
    starts = range(0, len(tokens), rows)
    own = [(tokens[i : i + rows, :-1], targets[i : i + rows], range(i, i + rows)) for i in starts]
    return [Batch.of_rows(ids, wanted, DropoutState(5, 1), samples) for ids, wanted, samples in own]


def model_of(fault: LayoutFault, site: Site) -> CausalLM:
    """The model on one rank, or in the fault's layout."""
    config = replace(config_from_hf(MODELS[fault.model]), dropouts=DROPOUTS)
    model = recompute_blocks(new_model(config, site, seed=12), fault.training.get("recompute", "none"))
    shake(model, 12)
    if site.ranks.size > 1 and fault.training.get("zero") == 3:
        deal_weights(model.layers, site.mesh)
    return model


def step_of(fault: LayoutFault, model: CausalLM, adam: AdamWSettings, clip_norm: float) -> TrainStep:
    """A training step in the fault's layout."""
    zero = fault.training.get("zero", 0)
    reduction = WithDealtWeights(model) if zero == 3 else make_reduction(model, zero)
    is_cut = model.site.mesh.sizes["pp"] > 1
    schedule = fault.training.get("schedule", "1f1b")
    runner = PipelineRunner(model, schedule, reduction) if is_cut else PlainRunner(model, reduction)
    return TrainStep(model, AdamW(reduction.params, adam, model.dtype), clip_norm, None, runner, reduction)


def site_of(fault: LayoutFault, group: Group) -> Site:
    return make_site(make_mesh(group, fault.mesh), dtype="float64", **fault.site)


def verified(fault: LayoutFault) -> Report:
    """What `mpitp verify` finds. Raises PlacementError where the types refuse the model."""
    settings = Settings(default_tolerance("float64", is_exact=False), max(1, fault.training.get("steps", 0)))

    def run(group: Group) -> Report:
        return verify(
            site_of(fault, group),
            lambda site: model_of(fault, site),
            batches_of(fault),
            settings,
            lambda model, adam, clip_norm: step_of(fault, model, adam, clip_norm),
        )

    return run_threads(prod(fault.mesh.values()), run)[0]


class Count(GroupObserver):
    """How often each collective was called, and over which ranks."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def around_collective(self, call: Any, arrays: Any, group: Any, run: Any) -> Any:
        op = call.op.removeprefix("start ")
        if not op.startswith("wait"):
            over = "" if group.members is None else f" over {'.'.join(map(str, group.members))}"
            self.calls[f"{op}({call.detail}) {list(call.shape)}{over}"] += 1
        return run()


def finished(fault: LayoutFault, site: Site) -> CausalLM:
    """The model, damaged where the fault is one of models and planted: that happens when `verify` begins to look."""
    model = model_of(fault, site)
    mpitp.verify.run.record_layers(model).is_open = False
    return model


def calls_of(fault: LayoutFault) -> Mapping[str, int]:
    """Rank 0's collectives and messages in a training step."""

    def run(group: Group) -> Counter[str]:
        count = Count()
        site = site_of(fault, ObservedGroup(group, count))
        step = step_of(fault, finished(fault, site), AdamWSettings(), 1.0)
        count.calls.clear()
        step(deal(site, batches_of(fault)), 1e-3)
        return count.calls

    return run_threads(prod(fault.mesh.values()), run)[0]


def losses_of(fault: LayoutFault) -> tuple[list[float], list[float]]:
    """The losses of two steps on one rank, and in the layout."""

    def run(group: Group) -> list[float]:
        site = site_of(fault, group) if group.size > 1 else make_site(group, dtype="float64")
        step = step_of(fault, finished(fault, site), AdamWSettings(), 1.0)
        return [step(deal(site, batches_of(fault)), 1e-2).loss for _ in range(2)]

    return run_threads(1, run)[0], run_threads(prod(fault.mesh.values()), run)[0]
