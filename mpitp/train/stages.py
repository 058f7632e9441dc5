"""Whether a run's model can be laid on its mesh, and has stages enough with its microbatches; and what runs them."""

from __future__ import annotations

from typing import Protocol

from mpitp.backend.device import AbstractDevice
from mpitp.comm.mesh import Mesh
from mpitp.config import RunConfig
from mpitp.errors import ConfigError
from mpitp.layers.site import Site
from mpitp.models.any_config import AnyConfig
from mpitp.models.config import DecoderConfig
from mpitp.models.layered import LayeredModel
from mpitp.models.runner import PlainRunner, Progress, Runner
from mpitp.pipeline.runner import PipelineRunner
from mpitp.train.deal import Deal
from mpitp.train.setup import num_microbatches, run_source, site_on


def make_runner(config: RunConfig, model: LayeredModel, progress: Progress) -> Runner:
    """How the run's microbatches go through the model; `progress` is told how far they are."""
    if config.mesh.pp > 1:
        return PipelineRunner(model, config.mesh.schedule, progress)
    return PlainRunner(model, progress)


class Cuttable(Protocol):
    """A run's model, not made yet."""

    @property
    def config(self) -> AnyConfig:
        """Of the whole model."""

    def check(self, site: Site) -> None:
        """Raise ConfigError where the model can't be laid on such a site. Nothing is allocated."""


def check_pipeline(config: RunConfig, decoder: DecoderConfig, mesh: Mesh) -> None:
    """The same as `check_layout` of a decoder."""
    check_layout(config, run_source(config, decoder), mesh)


def check_layout(config: RunConfig, source: Cuttable, mesh: Mesh) -> None:
    """Raise ConfigError where the model can't be laid on the run's site, where it or the microbatches of a step aren't
    enough for the stages, or where there are no experts to be dealt.
    """
    model = source.config
    if config.mesh.ep > 1 and not (isinstance(model, DecoderConfig) and model.traits.mixture is not None):
        raise ConfigError(
            f"mesh.ep = {config.mesh.ep} deals experts to ranks, but a model of type {model.model_type!r} has none; "
            "give the ranks to mesh.dp, which is the same for all else"
        )
    source.check(site_on(config, model, mesh, AbstractDevice()))
    if config.mesh.pp == 1:
        return
    if config.optim.zero == 3 and config.mesh.schedule == "zb":
        raise ConfigError(
            "optim.zero = 3 beside mesh.schedule = zb: weight gradients that are put off are made when whole weights "
            "are gone; use optim.zero = 2, whose weights stay, or another schedule (1f1b, gpipe, interleaved)"
        )
    count, replicas, stages = num_microbatches(config), config.mesh.replicas, config.mesh.pp
    if mesh.weights("dp", "ep"):
        if refusal := refusal_of_unequal(config, mesh):
            raise ConfigError(refusal)
        return
    if config.mesh.schedule == "interleaved" and count % (replicas * stages):
        raise ConfigError(_not_in_rounds(config, count))
    if count // replicas < stages:
        raise ConfigError(_too_few(config, count))
    if config.optim.zero == 3 and count % replicas:
        raise ConfigError(_not_alike(config, count))


def refusal_of_unequal(config: RunConfig, mesh: Mesh) -> str:
    """Why the stages of a mesh can't have the microbatches that its replicas get by weight; "" where they can."""
    counts, stages = Deal.on(mesh).counts(num_microbatches(config)), config.mesh.pp
    told = f"mesh.shares deals {sum(counts)} microbatches as {list(counts)} to the replicas"
    if config.mesh.schedule == "interleaved" and any(count % stages for count in counts):
        return f"{told}, but schedule interleaved takes them in rounds of {stages}; use another schedule"
    if min(counts) < stages:
        return (
            f"{told}, but mesh.pp = {stages} stages need at least {stages} each; a larger train.global_batch_size, a "
            "smaller train.micro_batch_size or weights nearer to one another would do"
        )
    if config.optim.zero == 3 and len(set(counts)) > 1:
        return f"{told}, but optim.zero = 3 beside mesh.pp needs as many on each; optim.zero = 2 would do"
    return ""


def _too_few(config: RunConfig, count: int) -> str:
    """Why a step has too few microbatches, and what is nearest that has enough."""
    replicas, stages, size = config.mesh.replicas, config.mesh.pp, config.global_batch_size
    smaller = [n for n in range(config.train.micro_batch_size, 0, -1) if -(-size // n) // replicas >= stages]
    cures = [f"train.micro_batch_size = {smaller[0]}"] if smaller else []
    cures.append(f"train.global_batch_size = {stages * replicas * config.train.micro_batch_size}")
    cures += [f"mesh.pp = {count // replicas}"] if count // replicas else []
    return (
        f"{_microbatches(config, count)}, but mesh.pp = {stages} stages need at least {stages}"
        f"{' for each replica' if replicas > 1 else ''}, or some would never be busy with the others; "
        f"{' or '.join(cures)} would do"
    )


def _not_alike(config: RunConfig, count: int) -> str:
    """Replicas of a stage gather its weights for every microbatch, so that each must have as many."""
    replicas, size = config.mesh.replicas, config.train.micro_batch_size
    near = [n * replicas * size for n in (count // replicas, count // replicas + 1) if n]
    sizes = " or ".join(map(str, near))
    return (
        f"{_microbatches(config, count)}, but optim.zero = 3 beside mesh.pp = {config.mesh.pp} needs as many on each "
        f"of mesh.dp = {replicas} replicas; train.global_batch_size = {sizes}, or optim.zero = 2 would do"
    )


def _not_in_rounds(config: RunConfig, count: int) -> str:
    rounds = config.mesh.replicas * config.mesh.pp
    near = [n * rounds for n in (count // rounds, count // rounds + 1) if n]
    sizes = " or ".join(str(n * config.train.micro_batch_size) for n in near)
    each = f"mesh.pp = {config.mesh.pp}" + (f" x mesh.dp = {config.mesh.dp}" if config.mesh.dp > 1 else "")
    return (
        f"{_microbatches(config, count)}, but schedule interleaved takes them in rounds of {each}: {count} = "
        f'{count // rounds} x {rounds} + {count % rounds}; train.global_batch_size = {sizes}, or mesh.schedule = "1f1b"'
    )


def _microbatches(config: RunConfig, count: int) -> str:
    what = "microbatch" if count == 1 else "microbatches"
    size, micro = config.global_batch_size, config.train.micro_batch_size
    return f"train.global_batch_size={size} in microbatches of {micro} is {count} {what} a step"
