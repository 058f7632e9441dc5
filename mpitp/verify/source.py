"""Where the model and the batch of a verification come from: a model directory, or a run file."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.arrays import array_module
from mpitp.backend.device import Device
from mpitp.backend.rng import normal_box, stream_key
from mpitp.checkpoint.load import ModelSource, load_config, model_facts
from mpitp.comm.agreement import Facts
from mpitp.comm.environment import launch_claim
from mpitp.comm.group import Group
from mpitp.comm.mesh import Mesh, abstract_mesh, make_mesh, mesh_sizes
from mpitp.comm.serial import SerialGroup
from mpitp.config import RunConfig
from mpitp.errors import ConfigError, UsageError
from mpitp.layers.partition import share_of
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows, Run
from mpitp.layers.site import Site, choose_blocks, make_site
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.registry import abstract_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.run_file import load_run_config
from mpitp.train.facts import run_facts
from mpitp.train.setup import (
    check_own_group,
    model_config,
    open_data,
    run_mesh,
    run_reduction,
    run_source,
    step_batches,
)
from mpitp.train.stages import check_pipeline, make_runner
from mpitp.train.step import TrainStep
from mpitp.verify.run import plain_step


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be made on any site, fresh ones shaken; the others say what the site to make it on is like.

    `run`: the run file whose mesh, schedule and optimizer make the layout; None: all ranks lie along tp.
    """

    model: ModelSource
    dtype: str
    invariant_blocks: int = 0
    run: RunConfig | None = None

    def make(self, site: Site) -> CausalLM:
        """The model on `site`; on one rank the plain one."""
        model = (self.model if site.ranks.size > 1 else dataclasses.replace(self.model, deals_weights=False)).make(site)
        if self.model.directory is None:
            shake(model, self.model.seed)
        return model

    def site(self, group: Group, device: Device) -> Site:
        """All ranks of a group, as the layout that is checked."""
        mesh = make_mesh(group) if self.run is None else run_mesh(self.run, group)
        if self.run is not None:
            check_own_group(self.run, group)
            check_pipeline(self.run, self.model.config, mesh)
        return self.site_on(mesh, device)

    def site_on(self, mesh: Mesh, device: Device | None = None) -> Site:
        """The layout that is checked, on a mesh."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": device, "invariant_blocks": self.invariant_blocks}
        if self.run is not None:
            options |= {"sequence_parallel": self.run.mesh.sequence_parallel, "cp_form": self.run.mesh.cp_form}
        return make_site(mesh, **options)

    def step(self, model: CausalLM, settings: AdamWSettings, clip_norm: float) -> TrainStep:
        """What trains the model in the layout that is checked."""
        if self.run is None:
            return plain_step(model, settings, clip_norm)
        reduction = run_reduction(self.run, model)
        optimizer = AdamW(reduction.params, settings, model.dtype)
        return TrainStep(model, optimizer, clip_norm, None, make_runner(self.run, model, reduction), reduction)

    def sizes(self, ranks: int) -> dict[str, int]:
        """Ranks along each axis in a job of so many. Raises ConfigError where that can't be."""
        if self.run is None:
            return {"tp": ranks}
        others = {axis: getattr(self.run.mesh, axis) for axis in ("pp", "dp", "cp")}
        sizes = mesh_sizes({**others, "tp": self.run.mesh.tp}, ranks)
        check_pipeline(self.run, self.model.config, abstract_mesh(sizes))
        return sizes

    def num_elements(self, num_layers: int | None = None) -> int:
        """Elements of all parameters of the model, or of one with so many blocks."""
        one = dataclasses.replace(self.model.config, num_layers=1)
        params = abstract_model(one, make_site(SerialGroup())).named_params()
        sizes = {name: param.data.size for name, param in params}
        block = sum(size for name, size in sizes.items() if name.startswith("blocks."))
        return sum(sizes.values()) + ((num_layers or len(self.model.chosen_blocks)) - 1) * block


def source_of(args: SourceArguments, ranks: int | None = None) -> tuple[Source, Callable[[], list[Batch]]]:
    """The model that the arguments ask for, and what makes the microbatches of a step: as many as its layout needs to
    keep every rank busy. `ranks`: of a job that isn't started (None: this one's).
    """
    run = None
    if args.run_file is not None:
        run = load_run_config(args.run_file, args.overrides, ranks=ranks or launch_claim(os.environ).size)
        if run.task.kind != "text":
            raise ConfigError(f"verify runs models that continue text; task.kind = {run.task.kind!r} isn't one")
        data = open_data(run)
        model = run_source(run, model_config(run, data))
        invariant, blocks = args.invariant or run.train.invariant, args.invariant_blocks or run.train.invariant_blocks
        needed = run.mesh.dp * run.mesh.pp
        make_batches = lambda: step_batches(run, model.config, data.train, step=1)[:needed]  # noqa: E731
    else:
        assert args.model is not None
        model = ModelSource(load_config(args.model), Path(args.model), args.seed)
        invariant, blocks = args.invariant, args.invariant_blocks
        make_batches = lambda: [random_batch(model.config, args.batch, args.seq, args.seed)]  # noqa: E731
    model = dataclasses.replace(model, blocks=parse_layers(args.layers, model.config.num_layers))
    chosen = choose_blocks(invariant, blocks, model.config.heads)
    return Source(model, args.dtype, chosen, run), make_batches


def source_facts(args: argparse.Namespace) -> Facts:
    """What the command line names, for the comparison between ranks."""
    if args.config is None:
        return model_facts("--model", args.model)
    return run_facts(load_run_config(args.config, args.set, ranks=launch_claim(os.environ).size))


@dataclass(frozen=True, slots=True)
class SourceArguments:
    """What the command line says about model and batch; exactly one of `model` and `run_file` is given."""

    model: str | None
    run_file: str | None
    overrides: tuple[str, ...] = ()
    layers: str | None = None
    batch: int = 2
    seq: int = 16
    seed: int = 0
    dtype: str = "float32"
    invariant: bool = False
    invariant_blocks: int = 0


def random_batch(config: DecoderConfig, batch: int, seq: int, seed: int) -> Batch:
    """Random tokens: `batch` sequences of `seq`, with the model's own dropout rates in force."""
    if batch < 1 or seq < 1:
        raise UsageError(f"--batch and --seq must be at least 1, got {batch} and {seq}")
    if seq > config.max_positions:
        raise UsageError(f"--seq {seq} exceeds the model's {config.max_positions} positions; use a smaller one")
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, seq + 1))
    has_dropout = any(dataclasses.astuple(config.dropouts))
    state = DropoutState(seed, 1) if has_dropout else None
    return Batch.of_rows(tokens[:, :-1], tokens[:, 1:], state)


def with_edges(batch: Batch, source: Source, ranks: int, first_sample: int = 0) -> Batch:
    """The batch, and behind it sequences of the first and last id of every rank's and every block's rows of the
    vocabulary, each as input and as target: a fault at the edge of a shard shows only there. `ranks`: along tp.
    `first_sample`: the lowest number that no sample of the step has; 0: that of the batch's runs.
    """
    config, blocks = source.model.config, source.invariant_blocks
    shares = [share_of(config.vocab_size, rank, ranks, blocks) for rank in range(ranks)]
    edges = sorted({edge for share in shares for rows in share.blocks if rows for edge in (rows[0], rows[-1])})
    assert batch.targets is not None
    runs, tokens, targets = list(batch.rows.runs), [batch.tokens], [batch.targets]
    for first in range(0, len(edges), config.max_positions):
        ids = np.array(edges[first : first + config.max_positions], np.int64)
        runs.append(Run((first_sample or len(batch.rows.runs)) + first // config.max_positions, 0, len(ids), len(runs)))
        tokens, targets = [*tokens, ids], [*targets, np.roll(ids, -1)]
    return dataclasses.replace(
        batch, tokens=np.concatenate(tokens), targets=np.concatenate(targets), rows=Rows(tuple(runs))
    )


def shake(model: CausalLM, seed: int) -> None:
    """Add a little to what a fresh model begins with as zeros or ones, the same in every layout.

    A bias that is zero hides that it is added twice, a norm's weight of ones that it is another rank's.
    """
    for name, param in model.named_params():
        if param.init_std:
            continue
        for part, place in param.placement.places():
            key = stream_key(seed, f"verify/{name}/{part.name}")
            noise = normal_box(part.shape, part.held, key, param.data.dtype, array_module(param.data))
            param.data[place] += noise * param.data.dtype.type(0.1)


def parse_layers(text: str | None, num_layers: int) -> range | None:
    """Blocks 0 to 3 for "0:4"; either side may be left out."""
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    try:
        chosen = range(int(start or 0), int(stop or num_layers))
    except ValueError:
        chosen = range(0)
    if not colon or not chosen or chosen.start < 0 or chosen.stop > num_layers:
        raise UsageError(f"--layers {text}: expected A:B within 0:{num_layers}, for example 0:{min(4, num_layers)}")
    return chosen


def needed_bytes(source: Source, ranks: int, steps: int, num_layers: int | None = None) -> int:
    """Memory on rank 0: weights, gradients, a record of both, optimizer state and updates; whole and its share."""
    copies = 4 + (3 if steps else 0)
    share = 1 + 1 / ranks
    return int(source.num_elements(num_layers) * np.dtype(source.dtype).itemsize * copies * share)


def check_memory(source: Source, ranks: int, steps: int, available: int | None) -> None:
    """Refuse a model that doesn't fit twice on rank 0. `available` None: not known, nothing is refused."""
    need = needed_bytes(source, ranks, steps)
    if available is None or need <= available:
        return
    first, layers = source.model.chosen_blocks.start, len(source.model.chosen_blocks)
    one = needed_bytes(source, ranks, steps, 1)
    fewer = 1 + int((available - one) * (layers - 1) / (need - one)) if one <= available else 0
    advice = (
        f"check fewer layers at a time: --layers {first}:{first + fewer}"
        if fewer
        else f"not even one layer fits ({one / 2**30:.2f} GiB); use a host with more memory"
    )
    raise ConfigError(
        f"verify needs {need / 2**30:.2f} GiB on rank 0 for its share and the one-rank model, but "
        f"{available / 2**30:.2f} GiB are free; {advice}"
    )


def available_bytes() -> int | None:
    """Free memory of this host, as Linux tells it; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
