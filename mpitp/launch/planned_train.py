"""`mpitp train`: the run, after its layout has been found where `[mesh] plan = "auto"` asks for that.

Planning knows of training, and not the other way round; here both meet: the verb is `train`'s own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpitp.errors import ConfigError
from mpitp.train import command

if TYPE_CHECKING:
    from mpitp.comm.group import Group
    from mpitp.config import RunConfig
    from mpitp.plan.machine_file import Machine
    from mpitp.train.loop import TrainLoop

QUICK_SECONDS = 4.0  # of measuring a machine that no file tells of
QUICK_BYTES = 1 << 23  # its largest array
MACHINE = "machine.toml"  # what was measured, in the run's directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp train`."""
    command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train, in the layout that was found or written."""
    return command.run(args, arranged)


def arranged(config: RunConfig, world: Group, resume: str | None) -> tuple[RunConfig, command.Observe | None]:
    """The run with its layout, and what writes this into the run's directory when training begins. A collective.

    Rank 0 searches and says what it chose and why; all others are told.
    """
    if config.mesh.plan != "auto":
        return config, None
    from mpitp.checkpoint.together import on_first_rank
    from mpitp.error_stream import tell
    from mpitp.plan.auto import FILE, alone, kept, planned

    if world.size == 1 and config.mesh.machine is None:
        tell(['mesh.plan = "auto": one rank has one layout; with mesh.machine its microbatches would be chosen too'])
        return alone(config), None
    found, note, measured = None, "", ""
    if resume is not None:
        found, note = on_first_rank(world, lambda: kept(config, world.size))
    if found is None:
        machine, measured = _machine(config, world)
        found = on_first_rank(world, lambda: planned(config, machine, world.size))
    if world.rank == 0:
        tell([*filter(None, [note]), *found.lines])
    texts = {FILE: found.record} | ({MACHINE: measured} if measured else {})

    def write(loop: TrainLoop) -> None:
        on_first_rank(loop.world, lambda: _write(Path(config.train.run_dir), texts))

    return found.config, write


def _write(directory: Path, texts: Mapping[str, str]) -> None:
    from mpitp.files import replace_file

    for name, text in texts.items():
        replace_file(directory / name, text)


def _machine(config: RunConfig, world: Group) -> tuple[Machine, str]:
    """The machine that the run file names, or else this one, measured in seconds; and its text if measured."""
    import tomllib

    from mpitp.bench.measure_machine import measure
    from mpitp.checkpoint.together import on_first_rank
    from mpitp.plan.machine_file import machine_from, read_machine

    path = config.mesh.machine
    if path is not None:
        return on_first_rank(world, lambda: read_machine(path)), ""
    if config.train.device != "cpu":
        raise ConfigError(
            f'mesh.plan = "auto" with train.device = {config.train.device!r}: only CPUs are measured when a run '
            "starts; name a machine file with mesh.machine (examples/machines has one of GPU nodes)"
        )
    facts = measure(
        argparse.Namespace(seconds=QUICK_SECONDS, most_bytes=QUICK_BYTES, dtype=[config.model.dtype], name=None), world
    )
    return machine_from(tomllib.loads(facts["file"])), facts["file"]
