"""A layout: how the ranks of a job share a model and a step, and nothing else. In words: `tp=8 pp=2 zero=1 micro=4`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mpitp.config import RECOMPUTE, RunConfig
from mpitp.error_stream import tell
from mpitp.errors import UsageError
from mpitp.plan.counts import MOST_RANKS, count_in

AXES = ("pp", "dp", "ep", "cp", "tp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb")


@dataclass(frozen=True, slots=True)
class Layout:
    """What the search chooses. `stages`: blocks of each part of a pipeline, in order; empty: dealt by cost."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    recompute: str = "none"
    schedule: str = "1f1b"
    chunks: int = 1
    micro: int = 1
    stages: tuple[int, ...] = ()
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Of the job."""
        return self.pp * self.dp * self.ep * self.cp * self.tp

    @property
    def replicas(self) -> int:
        """Ranks over which a parameter's copies lie: its gradients are summed over them, ZeRO deals to them. Those of
        experts lie over 1/ep of them.
        """
        return self.dp * self.ep * self.cp

    @property
    def deals(self) -> int:
        """Ranks to which a step's microbatches are dealt."""
        return self.dp * self.ep

    def __str__(self) -> str:
        words = [f"{axis}={getattr(self, axis)}" for axis in ("tp", "pp", "dp", "ep", "cp") if getattr(self, axis) > 1]
        words += ["sp"] if self.sequence_parallel else []
        words += [f"zero={self.zero}"] if self.zero else []
        words += [self.schedule + (f" x{self.chunks}" if self.chunks > 1 else "")] if self.pp > 1 else []
        words += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        return " ".join([*(words or ["one rank"]), f"micro={self.micro}"])

    def keys(self) -> dict[str, dict[str, Any]]:
        """As sections of a run file: only what it needs to be this layout."""
        mesh: dict[str, Any] = {axis: getattr(self, axis) for axis in AXES if axis != "ep" or self.ep > 1}
        mesh["sequence_parallel"] = self.sequence_parallel
        if self.pp > 1:
            mesh |= {"schedule": self.schedule, "chunks": self.chunks if self.chunks > 1 else 0}
            mesh |= {"stages": list(self.stages)} if self.stages else {}
        train = {"micro_batch_size": self.micro, "recompute": self.recompute}
        return {"mesh": mesh, "train": train, "optim": {"zero": self.zero}}


def layout_of(config: RunConfig, ranks: int) -> Layout:
    """The layout that a run file asks for, on so many ranks."""
    from mpitp.comm.mesh import mesh_sizes

    mesh = config.mesh
    sizes = mesh_sizes({axis: getattr(mesh, axis) for axis in AXES}, ranks)
    return Layout(
        **{axis: sizes[axis] for axis in AXES},
        sequence_parallel=mesh.sequence_parallel and sizes["tp"] > 1,
        zero=config.optim.zero,
        recompute=config.train.recompute,
        schedule=mesh.schedule,
        chunks=mesh.num_chunks,
        micro=config.train.micro_batch_size,
        stages=mesh.stages,
    )


def tell_of_shares(config: RunConfig) -> None:
    """Say that ranks of unequal speed are none of a plan's, where the run file has such."""
    if config.mesh.shares != "equal":
        tell(["mesh.shares is left out of account: times and graphs of plans are those of equal ranks"])


def shares_fit(config: RunConfig, layout: Layout) -> bool:
    """Whether the weights that a run file gives to the ranks of its axes are as many as the layout has there."""
    return all(len(weights) == getattr(layout, axis) for axis, weights in config.mesh.weights.items())


_WORDS = {"sp": "sequence_parallel", "micro_batch_size": "micro"}


def changed(layout: Layout, text: str, ranks: int) -> Layout:
    """`layout` with what "tp=8,pp=1" names; dp, where it isn't named, has the ranks that are left.

    Raises UsageError for words that are no layout, and for axes that don't make `ranks`.
    """
    named: dict[str, Any] = {}
    for word in filter(None, text.replace(",", " ").split()):
        name, _, value = word.partition("=")
        name = _WORDS.get(name, name)
        named[name] = _value(name, value or "true", word)
    found = replace(layout, pp=1, dp=1, ep=1, cp=1, tp=1, stages=(), chunks=1)
    found = replace(found, **named)
    if "chunks" not in named and found.schedule == "interleaved" and found.pp > 1:
        found = replace(found, chunks=2)
    if "dp" not in named and ranks % found.ranks == 0:
        found = replace(found, dp=ranks // found.ranks)
    if found.ranks != ranks:
        product = " x ".join(f"{axis} {getattr(found, axis)}" for axis in AXES)
        raise UsageError(f"--compare {text}: {product} = {found.ranks} ranks, expected {ranks}")
    return replace(found, sequence_parallel=found.sequence_parallel and found.tp > 1)


def _value(name: str, text: str, word: str) -> Any:
    kinds: Mapping[str, Any] = {field.name: getattr(Layout(), field.name) for field in fields(Layout)}
    if name not in kinds or name == "stages":
        raise UsageError(
            f"--compare {word}: a layout has no {name!r}; it has {', '.join(k for k in kinds if k != 'stages')}"
        )
    usual = kinds[name]
    if isinstance(usual, bool):
        if text in ("true", "false"):
            return text == "true"
    elif isinstance(usual, int):
        if name == "zero" and text in ("0", "1", "2", "3"):
            return int(text)
        if name != "zero" and (count := count_in(text, MOST_RANKS)):
            return count
    elif (name == "schedule" and text in SCHEDULES) or (name == "recompute" and RECOMPUTE.holds(text)):
        return text
    raise UsageError(
        f"--compare {word}: {text!r} is no value of {name}; such as tp=8,pp=2,zero=1,recompute=full,sp=true"
    )
