"""`[mesh] plan = "auto"`: the layout of a training run, searched when it starts and kept when it is resumed.

What was found stands in the run's directory. A resumed run keeps it on as many ranks, and searches again on others or
where the run file no longer allows it: checkpoints have no layout, so that either goes on to the same numbers. Other
programs that read the run file take the layout that stands there, or search it as training would (`settled`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mpitp.config import MeshSection, RunConfig
from mpitp.errors import ConfigError, FileError
from mpitp.files import read_json
from mpitp.plan.choice import choose, machine_of, units_of
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine
from mpitp.plan.search_report import chosen_lines
from mpitp.plan.space import check_layout

FILE = "layout.json"  # in the run's directory
GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Planned:
    """A run with its layout, what is said of it, and what is written into the run's directory."""

    config: RunConfig
    lines: tuple[str, ...]
    record: str


def planned(config: RunConfig, machine: Machine, ranks: int) -> Planned:
    """The fastest layout that fits. Raises ConfigError where none does, or where none can be chosen."""
    choice = choose(config, machine, ranks)
    first, *others = chosen_lines(choice)
    return _planned(config, choice.best.layout, (*_left_aside(config), _said(first), *others))


def kept(config: RunConfig, ranks: int) -> tuple[Planned | None, str]:
    """A resumed run in the layout of the run so far; where that can't be, None and why."""
    path = Path(config.train.run_dir) / FILE
    if not path.exists():
        return None, ""
    try:
        layout = _layout_from(read_json(path))
    except (FileError, TypeError, ValueError) as error:
        return None, f"{path} doesn't tell the layout of the run so far ({error}): it is searched again"
    if layout.ranks != ranks:
        return None, f"the run so far had {layout.ranks} ranks, this job has {ranks}: its layout is searched again"
    try:
        check_layout(units_of(config), layout)
    except ConfigError as error:
        return None, f"the layout so far, {layout}, can't be any more ({error}): it is searched again"
    return _planned(config, layout, (_said(f"goes on in the layout of the run so far, {layout}"),)), ""


def settled(config: RunConfig, ranks: int, machine: Machine | None = None) -> tuple[RunConfig, tuple[str, ...]]:
    """A run as training would lay it on so many ranks, for whoever only looks at it, and what is to be said of that.

    The layout of the run so far, or else the one that a search finds on `machine` or the run file's own. Where neither
    is named, the axes of the run file stay: training would measure the machine first.
    """
    if config.mesh.plan != "auto":
        return config, ()
    found, note = kept(config, ranks)
    if found is None and (machine is not None or config.mesh.machine is not None):
        found = planned(config, machine or machine_of(config.mesh.machine), ranks)
    if found is not None:
        return found.config, (*filter(None, [note]), *found.lines)
    is_alone = config.mesh.replicas * config.mesh.cp == 1  # ZeRO is then that of the layout to be found
    optim = replace(config.optim, zero=0) if is_alone else config.optim
    given = replace(config, mesh=replace(config.mesh, plan=GIVEN), optim=optim)
    return given, (
        _said(
            "training finds the layout when it starts, on the machine that it measures; without one, here the run "
            "file's own axes count (mesh.machine names a machine's file)"
        ),
    )


def _planned(config: RunConfig, layout: Layout, lines: tuple[str, ...]) -> Planned:
    return Planned(with_layout(config, layout), lines, json.dumps(asdict(layout)) + "\n")


def _said(line: str) -> str:
    return f'mesh.plan = "auto": {line}'


def with_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """The run in a layout. What else a run file says of axes, stages and schedule is that of another one."""
    keys = layout.keys()
    mesh = {"stages": (), "chunks": 0, "ep": 1, "schedule": MeshSection().schedule, **keys["mesh"], "plan": GIVEN}
    mesh["stages"] = tuple(mesh["stages"])
    return replace(
        config,
        mesh=replace(config.mesh, **mesh),
        train=replace(config.train, **keys["train"]),
        optim=replace(config.optim, **keys["optim"]),
    )


def alone(config: RunConfig) -> RunConfig:
    """The run on one rank, in the microbatches that its file has."""
    return with_layout(config, Layout(micro=config.train.micro_batch_size, recompute=config.train.recompute))


def _layout_from(values: Mapping[str, Any]) -> Layout:
    """Raises ValueError for what is no layout."""
    usual = asdict(Layout())
    if set(values) != {field.name for field in fields(Layout)}:
        raise ValueError(f"it has {', '.join(values)}")
    for name, value in values.items():
        if type(value) is not (list if name == "stages" else type(usual[name])):
            raise ValueError(f"{name} = {value!r}")
    return Layout(**{**values, "stages": tuple(values["stages"])})


def _left_aside(config: RunConfig) -> Iterator[str]:
    """What the run file says of a layout although one is searched."""
    usual = MeshSection()
    names = ("tp", "pp", "dp", "ep", "cp", "schedule", "chunks", "stages", "sequence_parallel")
    told = [f"mesh.{name}" for name in names if getattr(config.mesh, name) != getattr(usual, name)]
    if told:
        yield f'{", ".join(told)} of the run file {"is" if len(told) == 1 else "are"} not used: mesh.plan = "auto"'
