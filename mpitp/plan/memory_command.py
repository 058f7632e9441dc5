"""`mpitp plan memory`: bytes that every rank of a run holds, from its run file alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpitp.paths import path_option

if TYPE_CHECKING:
    from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource
    from mpitp.checkpoint.encoder_source import EncoderSource
    from mpitp.checkpoint.load import ModelSource
    from mpitp.comm.mesh import Mesh
    from mpitp.config import RunConfig
    from mpitp.models.any_config import AnyConfig
    from mpitp.models.layered import LayeredModel
    from mpitp.plan.memory import RankMemory, StepPlan

    RunSource = ModelSource | EncoderSource | EncoderDecoderSource

HELP = "how much memory each rank needs"

_DESCRIPTION = """\
Tell the bytes that each rank of a run holds at the height of a training step: weights, gradients, optimizer state,
activations in flight, and what is on its way between replicas. By formula from the run file, for any number of ranks;
nothing is allocated, and the text need not be there where the model names its vocab_size (or from, or config).
Encoders, vision transformers and encoder-decoders ([task] kind) are known over every axis that they train over; texts
count as data.seq_len tokens each, sources and targets too, and their files must be there.

Beside these a rank has arrays that live for moments (logits and their gradient, a block's own), the windows in shared
memory through which the ranks of one node sum, and Python with its libraries, about 150 MB.
"""

_EPILOG = """\
examples:
  mpitp plan memory run.toml --ranks 8
  mpitp plan memory run.toml --ranks 64 --set mesh.dp=8 --set optim.zero=1 --set train.recompute=full
"""

_COLUMNS = ("weights", "gradients", "optimizer", "activations", "recomputed", "buffers", "total")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp plan memory`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("run_file", type=path_option, metavar="RUN.toml", help="what `mpitp train` takes")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="of the job")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run file"
    )
    parser.add_argument("--json", action="store_true", help="bytes of every rank, with its coordinates")


def run(args: argparse.Namespace) -> int:
    """Print the table or its numbers."""
    from mpitp.error_stream import tell
    from mpitp.plan.auto import settled
    from mpitp.plan.counts import MOST_RANKS, check_counts
    from mpitp.run_file import load_run_config

    check_counts(MOST_RANKS, ranks=args.ranks)
    config, lines = settled(load_run_config(args.run_file, args.set), args.ranks)
    tell(lines)
    ranks = run_memory(config, args.ranks)
    if args.json:
        print(json.dumps([rank.as_dict() for rank in ranks]))
    else:
        print("\n".join(table(config, ranks)))
    return 0


def run_memory(config: RunConfig, ranks: int) -> list[RankMemory]:
    """The memory of every rank of the run, counted once for all replicas that keep as many rows of every parameter.
    Raises ConfigError for a run that can't be laid on so many.
    """
    from mpitp.comm.mesh import abstract_mesh
    from mpitp.plan.memory import memory_of, share_of_rows
    from mpitp.train.setup import mesh_sizes
    from mpitp.train.stages import check_layout

    source = _source(config)
    check_layout(config, source, abstract_mesh(mesh_sizes(config), 0, ranks, config.mesh.weights))
    models: dict[Hashable, LayeredModel] = {}
    found: dict[Hashable, RankMemory] = {}
    memories = []
    for rank in range(ranks):
        mesh = abstract_mesh(mesh_sizes(config), rank, ranks, config.mesh.weights)
        place = tuple(number for axis, number in mesh.coordinates.items() if axis not in ("dp", "ep"))
        if place not in models:
            models[place] = _model(config, source, mesh)
        actions = _own_actions(config, mesh)
        kind = place, len(actions), share_of_rows(models[place], mesh) if config.optim.zero else ()
        if kind not in found:
            found[kind] = memory_of(models[place], _step_plan(config, source.config, actions), mesh)
        coordinates = {axis: mesh.coordinates[axis] for axis in found[kind].coordinates}
        memories.append(replace(found[kind], coordinates=coordinates))
    return memories


def _source(config: RunConfig) -> RunSource:
    """The model of the run. Labelled texts, images and pairs must be there, since they say what there is to choose
    from.
    """
    from mpitp.train.kinds import ENCODER_TASKS
    from mpitp.train.pair_task import PairTask
    from mpitp.train.setup import model_config, open_data, run_source

    if config.task.kind == "text":
        data = open_data(config) if Path(config.data.train).exists() else None
        return run_source(config, model_config(config, data))
    return (
        PairTask(config).source if config.task.kind == "translation" else ENCODER_TASKS[config.task.kind](config).source
    )


def _model(config: RunConfig, source: RunSource, mesh: Mesh) -> LayeredModel:
    """What a rank holds a part of; replicas are alike."""
    from mpitp.backend.device import AbstractDevice
    from mpitp.checkpoint.encoder_decoder import EncoderDecoderSource
    from mpitp.checkpoint.load import ModelSource
    from mpitp.models.encoder_decoders import abstract_encoder_decoder, recompute_both
    from mpitp.models.registry import abstract_model, recompute_blocks
    from mpitp.train.setup import site_on

    site = site_on(config, source.config, mesh, AbstractDevice())
    if isinstance(source, EncoderDecoderSource):
        return recompute_both(abstract_encoder_decoder(source.config, site, source.cutting), source.recompute)
    if isinstance(source, ModelSource):
        return recompute_blocks(abstract_model(source.config, site, source.cutting), source.recompute)
    return recompute_blocks(source.abstract(site), source.recompute)


def _step_plan(config: RunConfig, model: AnyConfig, actions: Sequence) -> StepPlan:
    from mpitp.layers.rows import Rows
    from mpitp.models.vision_config import VisionConfig
    from mpitp.plan.memory import StepPlan

    length = 1 + model.grid[0] * model.grid[1] if isinstance(model, VisionConfig) else config.data.seq_len
    rows = Rows.of((length,) * config.train.micro_batch_size)
    return StepPlan(rows, config.optim.zero, int(config.optim.bucket_mib * (1 << 20)), actions)


def _own_actions(config: RunConfig, mesh: Mesh) -> Sequence:
    """What a rank's stage does in a step; nothing where there is one alone."""
    from mpitp.pipeline.schedules import make_schedule
    from mpitp.train.deal import Deal
    from mpitp.train.setup import num_microbatches

    stages = mesh.sizes["pp"]
    if stages == 1:
        return ()
    count = len(Deal.on(mesh).of(num_microbatches(config)))
    return make_schedule(config.mesh.schedule, stages, count, config.mesh.num_chunks)[mesh.coordinates["pp"]]


def table(config: RunConfig, ranks: Sequence[RankMemory]) -> list[str]:
    """A line a rank, neighbours that need the same in one."""
    groups: list[tuple[int, int]] = []
    for rank, memory in enumerate(ranks):
        if groups and _numbers(ranks[groups[-1][0]]) == _numbers(memory):
            groups[-1] = (groups[-1][0], rank)
        else:
            groups.append((rank, rank))
    lines = [
        f"memory a rank, MB (10^6 bytes): {config.model.dtype}, microbatches of {config.train.micro_batch_size} x "
        f"{config.data.seq_len} tokens, recompute {config.train.recompute}, ZeRO {config.optim.zero}",
        "",
        f"{'ranks':10} {'place':16} " + " ".join(f"{name:>11}" for name in _COLUMNS) + f" {'in flight':>9}",
    ]
    for first, last in groups:
        memory = ranks[first]
        name = str(first) if first == last else f"{first}-{last}"
        shared = dict(set.intersection(*(set(ranks[rank].coordinates.items()) for rank in range(first, last + 1))))
        place = " ".join(f"{axis} {number}" for axis, number in memory.coordinates.items() if axis in shared)
        numbers = " ".join(f"{number / 1e6:11.2f}" for number in _numbers(memory))
        lines.append(f"{name:10} {place:16} {numbers} {memory.in_flight:9}")
    if config.mesh.shares == "measured":
        lines += ["", "mesh.shares are measured when the run starts: equal ones are counted here"]
    total = sum(memory.total for memory in ranks)
    return [*lines, "", f"together {total / 1e6:.2f} MB, the largest rank {max(m.total for m in ranks) / 1e6:.2f} MB"]


def _numbers(memory: RankMemory) -> list[int]:
    return [getattr(memory, name) for name in _COLUMNS]
