"""What a search found, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mpitp.plan.choice import Choice, Compared
from mpitp.plan.cost import StepCost
from mpitp.plan.search import in_units

BAR = 40
LIMITS = {  # what a part of a step is, in words
    "products": "matrix products at the machine's rate",
    "attention": "attention's scores at the machine's rate",
    "passes": "norms, activations and residual sums that read and write memory",
    "exponentials": "exponentials of softmax and activations",
    "starts": "starts of many small operations; larger microbatches or fewer cuts have fewer",
    "recompute": "forward passes that are run again for memory",
    "sums over tp": "sums over tp that nothing hides",
    "exchange over cp": "keys and values on their way over cp",
    "exchange over ep": "rows on their way to their experts and home over ep that nothing hides",
    "sums over replicas": "gradients and weights on their way between replicas",
    "tied tables": "the gradient of a table that the first and the last stage have",
    "bubble": "stages that wait; more microbatches would fill them",
    "optimizer": "the gradient norm and AdamW; ZeRO would deal it to replicas",
    "start of the step": "what a step takes to start, whatever its layout",
}


def lines(choice: Choice) -> list[str]:
    """The report."""
    best, tokens = choice.best, choice.step.sequences * choice.seq_len
    told = [
        f"{choice.ranks} ranks of {choice.machine.machine.name}, {in_units(choice.limit)} a rank; a step of "
        f"{choice.step.sequences} x {choice.seq_len} tokens; {choice.found.estimated} layouts looked at",
        "",
        f"{'':3}{'seconds':>9}{'tokens/s':>11}{'memory':>10}  layout",
    ]
    for number, cost in enumerate(choice.found.best, 1):
        told.append(f"{number:2} {_row(cost, tokens)}")
        told.append(f"{'':35}{_limits(cost)}")
    told += ["", "where the best one's step goes:", *_parts(best)]
    told += ["", "the front of time and memory, to 1.5 times the least time:", *_front(choice.found.front)]
    notes = [*_notes(choice), *(line for each in choice.compared for line in why_not(each, best))]
    return [*told, "", *notes] if notes else told


def chosen_lines(choice: Choice) -> list[str]:
    """What was chosen, and why, in few words."""
    best, tokens = choice.best, choice.step.sequences * choice.seq_len
    told = [
        f"{best.layout}, the fastest of {choice.found.estimated} layouts on {choice.ranks} ranks of "
        f"{choice.machine.machine.name}",
        f"{seconds(best.seconds)} a step foretold, {tokens / best.seconds:.4g} tokens/s, "
        f"{in_units(best.memory.total)} of {in_units(choice.limit)} a rank; {_limits(best)}",
    ]
    if len(choice.found.best) > 1:
        second = choice.found.best[1]
        told.append(f"the next one, {second.layout}, would take {second.seconds / best.seconds - 1:.1%} longer")
    return [*told, *_notes(choice)]


def _row(cost: StepCost, tokens: int) -> str:
    size = in_units(cost.memory.total)
    return f"{seconds(cost.seconds):>9}{tokens / cost.seconds:>11.4g}{size:>10}  {cost.layout}"


def seconds(value: float) -> str:
    """Three digits."""
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def _limits(cost: StepCost) -> str:
    """What takes longest, and each part's share."""
    share = {name: part / cost.seconds for name, part in cost.parts.items()}
    others = sorted((name for name in share if name != "products"), key=share.__getitem__, reverse=True)
    told = [f"{name} {share[name]:.0%}" for name in ["products", *others] if share[name] >= 0.02]
    return f"limited by {LIMITS[cost.limit]}: " + ", ".join(told)


def _parts(cost: StepCost) -> list[str]:
    told = []
    for name, part in sorted(cost.parts.items(), key=lambda item: -item[1]):
        if part > 0.001 * cost.seconds:
            bar = "#" * max(1, round(BAR * part / cost.seconds))
            told.append(f"  {name:20}{seconds(part):>9} {part / cost.seconds:5.0%} {bar}")
    told += [f"  {name:20}{seconds(part):>9}       hidden behind products" for name, part in cost.hidden.items()]
    return told


def _front(front: list[StepCost]) -> list[str]:
    longest = max(cost.seconds for cost in front)
    return [
        f"  {in_units(cost.memory.total):>9} {seconds(cost.seconds):>9} "
        f"{'#' * max(1, round(BAR * cost.seconds / longest)):{BAR}} {cost.layout}"
        for cost in front
    ]


def _notes(choice: Choice) -> Iterator[str]:
    best, per_node = choice.best, choice.machine.machine.ranks_per_node
    if choice.fewer is not None:
        cost = choice.fewer
        yield (
            f"{cost.layout.ranks} ranks are as fast: {seconds(cost.seconds)} with {cost.layout}, "
            f"{seconds(best.seconds)} on {choice.ranks}"
        )
    if choice.across is not None and choice.across.layout != best.layout:
        slower, sums = choice.across.seconds / best.seconds, choice.across.parts["sums over tp"]
        yield (
            f"tensor parallelism across nodes (tp > {per_node}) takes {slower:.3g} times as long at best: "
            f"{choice.across.layout}, {seconds(sums)} of its {seconds(choice.across.seconds)} in sums over tp"
        )


def why_not(compared: Compared, best: StepCost) -> Iterator[str]:
    """A layout of the user's against the best."""
    yield f"why not {compared.text}?"
    cost = compared.cost
    if cost is None:
        yield f"  it can't be: {compared.refusal}"
        return
    yield f"  {cost.layout}: {seconds(cost.seconds)}, {cost.seconds / best.seconds:.3g} times the best one's"
    if compared.refusal:
        yield f"  it doesn't fit: {compared.refusal}"
    more = {name: part - best.parts[name] for name, part in cost.parts.items()}
    for name, part in sorted(more.items(), key=lambda item: -abs(item[1])):
        if abs(part) > 0.01 * best.seconds:
            yield f"  {name:20}{'+' if part > 0 else '-'}{seconds(abs(part))}"


def as_dict(choice: Choice) -> dict[str, Any]:
    """For JSON."""
    return {
        "machine": choice.machine.machine.name,
        "ranks": choice.ranks,
        "memory_bytes": choice.limit,
        "estimated": choice.found.estimated,
        "best": [cost_dict(cost) for cost in choice.found.best],
        "front": [cost_dict(cost) for cost in choice.found.front],
        "fewer": choice.fewer and cost_dict(choice.fewer),
        "across": choice.across and cost_dict(choice.across),
        "compared": [
            {"text": each.text, "refusal": each.refusal, "cost": each.cost and cost_dict(each.cost)}
            for each in choice.compared
        ],
    }


def cost_dict(cost: StepCost) -> dict[str, Any]:
    """One layout with its cost."""
    return {
        "layout": asdict(cost.layout),
        "seconds": cost.seconds,
        "parts": cost.parts,
        "hidden": cost.hidden,
        "memory": cost.memory.as_dict(),
        "limit": cost.limit,
    }
