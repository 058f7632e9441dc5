"""The layout of a run chosen on a machine: the search's result, with what one wants to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mpitp.config import RunConfig
from mpitp.errors import ConfigError
from mpitp.plan.anatomy import Anatomy, Facts
from mpitp.plan.cost import Step, StepCost, cost_of
from mpitp.plan.layout import Layout, changed
from mpitp.plan.machine_file import Machine, read_machine
from mpitp.plan.planned_models import PLANNED_TASKS, PlannedConfig
from mpitp.plan.search import Found, Problem, fastest, in_units, search
from mpitp.plan.space import Units, check_layout, divisors
from mpitp.plan.sums import Span

AS_FAST = 1.02  # at most so many times as long is as fast
ALL_TRIED = 16  # ranks up to which every smaller number is looked at
SPARE_SECONDS = 1.1  # estimates in closed form may be so much above what a pipeline takes


@dataclass(frozen=True, slots=True)
class Compared:
    """A layout of the user's: what it costs, or why it can't be."""

    text: str
    cost: StepCost | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found. `across`: the fastest layout whose tensor parallelism leaves a node; `fewer`: one on fewer ranks
    that is as fast as the best.
    """

    machine: Machine
    step: Step
    seq_len: int
    ranks: int
    limit: float
    found: Found
    across: StepCost | None = None
    fewer: StepCost | None = None
    compared: list[Compared] = field(default_factory=list)

    @property
    def best(self) -> StepCost:
        """The fastest that fits."""
        return self.found.best[0]


def machine_of(path: str | None) -> Machine:
    """The machine of a file. Raises ConfigError where none is named."""
    if path is None:
        raise ConfigError(
            "which machine? name its file with --machine (or mesh.machine in the run file): "
            "`mpitp launch -n N -- bench machine --out machine.toml` measures one, examples/machines has two"
        )
    return read_machine(path)


def choose(
    config: RunConfig,
    machine: Machine,
    ranks: int,
    memory: float | None = None,
    keep: int = 5,
    compare: Sequence[str] = (),
) -> Choice:
    """Search, and look at what else may interest."""
    problem = problem_of(config, machine, memory)
    for text in compare:
        changed(Layout(), text, ranks)  # words that are no layout are refused before anything is searched
    if ranks > machine.most_ranks:
        raise ConfigError(
            f"{ranks} ranks, but the machine file tells of one node of {machine.machine.ranks_per_node} and has no "
            "[between_nodes]; raise [machine] ranks_per_node where the node has cores for more, add the section, or "
            "take fewer ranks"
        )
    found = search(problem, ranks, keep)
    best = found.best[0]
    compared = [_compare(problem, config, best.layout, text, ranks) for text in compare]
    return Choice(
        machine,
        problem.step,
        config.data.seq_len,
        ranks,
        problem.limit,
        found,
        _across(problem, ranks),
        _fewer(problem, best),
        compared,
    )


def problem_of(config: RunConfig, machine: Machine, memory: float | None = None) -> Problem:
    """What is searched for a run. Raises ConfigError for one whose layout can't be chosen."""
    check_run(config)
    model = planned_model(config)
    facts = Facts(model, config.model.dtype, config.data.seq_len, config.mesh.cp_form)
    step = Step(config.train.global_batch_size, int(config.optim.bucket_mib * (1 << 20)))
    units = Units.of(model, config.data.seq_len, step.sequences)
    return Problem(Anatomy(facts, machine), units, step, memory or machine.machine.memory_bytes)


def units_of(config: RunConfig) -> Units:
    """What a run has to be dealt."""
    check_run(config)
    return Units.of(planned_model(config), config.data.seq_len, config.train.global_batch_size)


def check_run(config: RunConfig) -> None:
    """Raise ConfigError for a run whose layout can't be chosen."""
    if config.task.kind not in PLANNED_TASKS:
        raise ConfigError(
            f"a layout is chosen for models that continue or translate text, not for task.kind = {config.task.kind!r}: "
            "set [mesh] yourself; plan memory tells what each rank holds"
        )
    if config.train.invariant:
        raise ConfigError(
            "train.invariant = true decides by itself in which blocks sums go; layouts are chosen for runs without it"
        )
    if not config.train.global_batch_size:
        raise ConfigError(
            "train.global_batch_size isn't set: a step would have another number of sequences in every layout; set it"
        )


def planned_model(config: RunConfig) -> PlannedConfig:
    """The model of a run of `PLANNED_TASKS`, whose text need not be there."""
    from mpitp.plan.graph_models import config_of

    found = config_of(config)
    assert isinstance(found, PlannedConfig), f"no layouts of a {found.model_type}"
    return found


def _across(problem: Problem, ranks: int) -> StepCost | None:
    """The fastest layout whose tensor parallelism leaves a node."""
    per_node = problem.anatomy.machine.machine.ranks_per_node
    if ranks <= per_node:
        return None
    return fastest(problem, ranks, lambda layout: Span.of(layout.tp, 1, per_node).nodes > 1)


def _fewer(problem: Problem, best: StepCost) -> StepCost | None:
    """The fewest of some smaller numbers of ranks that are as fast, from the largest on until one is slower."""
    ranks, found = best.layout.ranks, None
    for fewer in _smaller(ranks):
        cost = fastest(problem, fewer, longest=SPARE_SECONDS * AS_FAST * best.seconds)
        if cost is not None and cost.seconds <= AS_FAST * best.seconds:
            found = cost
        elif cost is not None or ranks > ALL_TRIED:
            break
    return found


def _smaller(ranks: int) -> list[int]:
    """Numbers below: parts of it and powers of two, and all of a few ranks."""
    powers = [1 << i for i in range(ranks.bit_length())]
    every = range(1, ranks) if ranks <= ALL_TRIED else ()
    return sorted((n for n in {*divisors(ranks), *powers, *every} if n < ranks), reverse=True)


def _compare(problem: Problem, config: RunConfig, best: Layout, text: str, ranks: int) -> Compared:
    """The layout of the user's; the size of a microbatch, where it isn't named, is what suits it best."""
    start = Layout(recompute=config.train.recompute, schedule=config.mesh.schedule, micro=best.micro)
    layout = changed(start, text, ranks)
    sizes = [layout.micro] if "micro" in text else divisors(problem.units.sequences)
    allowed, refusal = [], ""
    for micro in sizes:
        try:
            check_layout(problem.units, replace(layout, micro=micro))
            allowed.append(cost_of(problem.anatomy, problem.step, replace(layout, micro=micro)))
        except ConfigError as error:
            refusal = refusal or str(error)
    if not allowed:
        return Compared(text, None, refusal)
    fitting = [cost for cost in allowed if cost.memory.total <= problem.limit]
    if fitting:
        return Compared(text, min(fitting, key=lambda cost: cost.seconds))
    cost = min(allowed, key=lambda cost: cost.memory.total)
    parts = cost.memory.as_dict()
    most = max((name for name in parts if name != "total"), key=parts.__getitem__)
    needs = f"needs {in_units(cost.memory.total)} of {in_units(problem.limit)} a rank"
    return Compared(text, cost, f"{needs}, {most} most of it: {in_units(parts[most])}")
