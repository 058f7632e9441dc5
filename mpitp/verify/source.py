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
from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource, load_encoder_decoder_config
from mpitp.checkpoint.encoder_source import EncoderSource, load_other_config
from mpitp.checkpoint.hf_directory import read_config
from mpitp.checkpoint.load import ModelSource, load_config, model_facts
from mpitp.checkpoint.together import on_first_rank
from mpitp.comm.agreement import Facts
from mpitp.comm.environment import launch_claim
from mpitp.comm.group import Group
from mpitp.comm.mesh import Mesh, abstract_mesh, make_mesh, mesh_sizes
from mpitp.comm.serial import SerialGroup
from mpitp.config import RunConfig
from mpitp.errors import ConfigError, UsageError
from mpitp.layers.site import Site, choose_blocks, make_site
from mpitp.models.batch import Batch
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES
from mpitp.models.kinds import is_encoder_decoder
from mpitp.models.layered import LayeredModel
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.plan.auto import settled
from mpitp.run_file import load_run_config
from mpitp.train.deal import ALONE
from mpitp.train.encoder_task import EncoderTask
from mpitp.train.facts import run_facts
from mpitp.train.kinds import ENCODER_TASKS
from mpitp.train.pair_task import PairTask
from mpitp.train.setup import (
    check_own_group,
    model_config,
    open_data,
    run_mesh,
    run_reduction,
    run_source,
    step_batches,
)
from mpitp.train.shares import with_shares
from mpitp.train.stages import check_layout, make_runner
from mpitp.train.step import TrainStep
from mpitp.verify.batches import random_batch
from mpitp.verify.run import plain_step

AnySource = ModelSource | EncoderSource | EncoderDecoderSource
CLASSES_OF_A_NEW_HEAD = 5  # on three ranks 2, 2 and 1


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be made on any site, fresh ones shaken; the others say what the site to make it on is like.

    `run`: the run file whose mesh, schedule and optimizer make the layout; None: all ranks lie along tp. `notices`: on
    how that was found.
    """

    model: AnySource
    dtype: str
    invariant_blocks: int = 0
    run: RunConfig | None = None
    notices: tuple[str, ...] = ()

    def make(self, site: Site) -> LayeredModel:
        """The model on `site`; on one rank the plain one."""
        alone = site.ranks.size == 1
        model = (dataclasses.replace(self.model, deals_weights=False) if alone else self.model).make(site)
        if self.model.directory is None:
            shake(model, self.model.seed)
        return model

    def site(self, group: Group, device: Device) -> Site:
        """All ranks of a group, as the layout that is checked."""
        if self.run is None:
            return self.site_on(make_mesh(group), device)
        check_own_group(self.run, group)
        mesh = run_mesh(with_shares(self.run, self.model.config.hidden_size, group, device), group)
        self._check_stages(mesh)
        return self.site_on(mesh, device)

    def _check_stages(self, mesh: Mesh) -> None:
        """Raise ConfigError where model and microbatches aren't enough for the stages of a run's mesh."""
        if self.run is not None:
            check_layout(self.run, self.model, mesh)

    def site_on(self, mesh: Mesh, device: Device | None = None) -> Site:
        """The layout that is checked, on a mesh."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": device, "invariant_blocks": self.invariant_blocks}
        if self.run is not None:
            options |= {"sequence_parallel": self.run.mesh.sequence_parallel, "cp_form": self.run.mesh.cp_form}
        return make_site(mesh, **options)

    def step(self, model: LayeredModel, settings: AdamWSettings, clip_norm: float) -> TrainStep:
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
        others = {axis: getattr(self.run.mesh, axis) for axis in ("pp", "dp", "ep", "cp")}
        sizes = mesh_sizes({**others, "tp": self.run.mesh.tp}, ranks)
        self._check_stages(abstract_mesh(sizes))
        return sizes

    def num_elements(self, num_layers: int | None = None) -> int:
        """Elements of all parameters of the model, or of one that continues text with so many blocks."""
        if not isinstance(self.model, ModelSource):
            params = self.model.abstract(make_site(SerialGroup())).named_params()
            return sum(param.data.size for _, param in params)
        params = self.model.abstract(make_site(SerialGroup()), 1).named_params()
        sizes = {name: param.data.size for name, param in params}
        block = sum(size for name, size in sizes.items() if name.startswith("blocks."))
        return sum(sizes.values()) + ((num_layers or len(self.model.chosen_blocks)) - 1) * block


def source_of(args: SourceArguments, job: Group | int = 1) -> tuple[Source, Callable[[], list[Batch]]]:
    """The model that the arguments ask for, and what makes the microbatches of a step: as many as its layout needs to
    keep every rank busy. `job`: its ranks, or how many there are in one that isn't started.
    """
    run: RunConfig | None = None
    notices: tuple[str, ...] = ()
    if args.run_file is not None:
        run, notices = _laid_out(args, job)
        model, make_batches = _of_run(run)
        invariant, blocks = args.invariant or run.train.invariant, args.invariant_blocks or run.train.invariant_blocks
    else:
        assert args.model is not None
        model = _of_directory(Path(args.model), args.seed)
        invariant, blocks = args.invariant, args.invariant_blocks
        make_batches = lambda: [random_batch(model.config, args.batch, args.seq, args.seed)]  # noqa: E731
    if isinstance(model, ModelSource):
        model = dataclasses.replace(model, blocks=parse_layers(args.layers, model.config.num_layers))
    elif args.layers is not None:
        kind = "an encoder" if isinstance(model, EncoderSource) else "an encoder with a decoder"
        raise UsageError(f"--layers takes blocks of a model that continues text; {kind} is checked whole")
    chosen = choose_blocks(invariant, blocks, model.config.heads)
    return Source(model, args.dtype, chosen, run, notices), make_batches


def _laid_out(args: SourceArguments, job: Group | int) -> tuple[RunConfig, tuple[str, ...]]:
    """The run of a run file, with the layout that training would find; that is the first rank's to find."""
    assert args.run_file is not None
    ranks = job if isinstance(job, int) else job.size
    run = load_run_config(args.run_file, args.overrides, ranks=ranks)
    if isinstance(job, int) or run.mesh.plan == "given":
        return settled(run, ranks)
    return on_first_rank(job, lambda: settled(run, ranks))


def _of_run(run: RunConfig) -> tuple[AnySource, Callable[[], list[Batch]]]:
    """The model of a run file, and its first microbatches."""
    needed = run.mesh.replicas * run.mesh.pp
    if run.task.kind == "text":
        data = open_data(run)
        model = run_source(run, model_config(run, data))
        return model, lambda: step_batches(run, model.config, data.train, step=1)[:needed]
    task: PairTask | EncoderTask
    task = PairTask(run) if run.task.kind == "translation" else ENCODER_TASKS[run.task.kind](run)
    return task.source, lambda: task.step_batches(1, ALONE)[:needed]


def _of_directory(directory: Path, seed: int) -> AnySource:
    """The model of a directory. An encoder without a head is given one, so that there is a loss."""
    if is_encoder_decoder(read_config(directory)):
        return EncoderDecoderSource(load_encoder_decoder_config(directory), directory, seed)
    config = load_other_config(directory)
    if config is None:
        return ModelSource(load_config(directory), directory, seed)
    if config.head == FEATURES:
        config = config.with_head(CLASSIFICATION, [f"LABEL_{i}" for i in range(CLASSES_OF_A_NEW_HEAD)])
    return EncoderSource(config, directory, seed)


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
    seq: int | None = None
    seed: int = 0
    dtype: str = "float32"
    invariant: bool = False
    invariant_blocks: int = 0


def shake(model: LayeredModel, seed: int) -> None:
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
    advice = _advice(source, need, available, lambda layers: needed_bytes(source, ranks, steps, layers))
    raise ConfigError(
        f"verify needs {need / 2**30:.2f} GiB on rank 0 for its share and the one-rank model, but "
        f"{available / 2**30:.2f} GiB are free; {advice}"
    )


def _advice(source: Source, need: int, available: int, of_layers: Callable[[int], int]) -> str:
    """What helps where `need` bytes are too many; `of_layers`: what so many blocks need."""
    if not isinstance(source.model, ModelSource):
        return "use a host with more memory"
    first, layers = source.model.chosen_blocks.start, len(source.model.chosen_blocks)
    one = of_layers(1)
    if one > available:
        return f"not even one layer fits ({one / 2**30:.2f} GiB); use a host with more memory"
    fewer = 1 + int((available - one) * (layers - 1) / (need - one))
    return f"check fewer layers at a time: --layers {first}:{first + fewer}"


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
