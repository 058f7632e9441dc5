"""What breaks, as a game: a fault is planted in a small model, tools show what it does, and you say what it is.

The faults are mistakes of tensor parallelism (`planted_bugs.py`), on 2 ranks. You begin with 10 points; a tool costs
one or two, a wrong answer three. `python examples/check.py breaks` takes one by chance, `breaks 7` number 7.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mpitp.verify.run
from examples.planted_bugs import FAULTS, GPT2, LLAMA, Fault
from mpitp.comm import Group, run_threads
from mpitp.comm.observed import GroupObserver, ObservedGroup
from mpitp.layers import Site, make_site
from mpitp.models import CausalLM, config_from_hf, new_model
from mpitp.models.config import Dropouts
from mpitp.verify.command import default_tolerance
from mpitp.verify.report import KINDS, summary
from mpitp.verify.run import Report, Settings, verify
from mpitp.verify.source import random_batch, shake

RANKS, START, WRONG = 2, 10, 3
NAMES = tuple(FAULTS)
NUMBERS = tuple(str(number) for number in range(1, len(NAMES) + 1))
HELP = """\
verify     which rows of `mpitp verify` differ first, in each order      costs 1
table      the first twelve rows that differ                             costs 1
ledger     collectives of both passes, right and broken                  costs 1
losses     the loss on 1, 2 and 3 ranks                                  costs 1
types      whether the types would have told beforehand                  costs 2
a, b, c    your answer: which mistake                              wrong costs 3
end        stop"""


@dataclass
class Game:
    """One fault, the points that are left, and what has been looked at already."""

    number: int
    points: int = START
    report: Report | None = None
    seen: set[str] = field(default_factory=set)

    @property
    def fault(self) -> Fault:
        """The one that is planted."""
        return FAULTS[NAMES[self.number - 1]]

    @property
    def config(self) -> Any:
        """A small model in which it can be made, with dropout in all places."""
        config = config_from_hf(GPT2 if self.fault.models[0] == "gpt2" else LLAMA)
        return replace(config, dropouts=Dropouts(embedding=0.1, attention=0.2, residual=0.15))

    def make(self, site: Site) -> CausalLM:
        """That model, norms and biases shaken."""
        model = new_model(self.config, site, seed=12)
        shake(model, 12)
        return model

    def verified(self) -> Report:
        """What `mpitp verify` finds with the fault in place."""
        if self.report is None:
            settings = Settings(default_tolerance("float64", is_exact=False), steps=1)
            batch = random_batch(self.config, batch=3, seq=7, seed=12)

            def run(group: Group) -> Report:
                return verify(make_site(group, dtype="float64"), self.make, batch, settings)

            with self.fault.planted():
                self.report = run_threads(RANKS, run)[0]
        return self.report


def choices(number: int) -> list[str]:
    """The mistake that is planted and two that show elsewhere, in an order of the number's own."""
    fault, order = FAULTS[NAMES[number - 1]], random.Random(number)
    others = sorted({each.mistake for each in FAULTS.values() if each.seen != fault.seen})
    picked = [fault.mistake, *order.sample(others, 2)]
    order.shuffle(picked)
    return picked


def show_verify(game: Game) -> str:
    return summary(game.verified(), [], RANKS)


def show_table(game: Game) -> str:
    rows = [row for row in game.verified().rows if not row.ok]
    lines = [f"{row.name:<30}{KINDS[row.kind]:<26}{row.largest_rel:9.1e}" for row in rows[:12]]
    return "\n".join([*lines, f"... and {len(rows) - 12} more"] if len(rows) > 12 else lines)


class Count(GroupObserver):
    """How often each collective was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def around_collective(self, call: Any, arrays: Any, group: Any, run: Callable[[], Any]) -> Any:
        op = call.op.removeprefix("start ")
        if not op.startswith("wait"):
            self.calls[f"{op}({call.detail}) {list(call.shape)}"] += 1
        return run()


def finished(game: Game, site: Site) -> CausalLM:
    """The model, damaged where the fault is one of models and planted: that happens when `verify` begins to look."""
    model = game.make(site)
    mpitp.verify.run.record_layers(model).is_open = False
    return model


def calls_of(game: Game) -> Counter[str]:
    """Rank 0's collectives of a forward and a backward pass."""
    batch = random_batch(game.config, batch=3, seq=7, seed=12)

    def run(group: Group) -> Counter[str]:
        count = Count()
        model = finished(game, make_site(ObservedGroup(group, count), dtype="float64"))
        count.calls.clear()
        _, ctx = model.loss_forward(batch)
        model.loss_backward(ctx, 1.0)
        return count.calls

    return run_threads(RANKS, run)[0]


def show_ledger(game: Game) -> str:
    right = calls_of(game)
    with game.fault.planted():
        broken = calls_of(game)
    lines = [f"{'collective':<50}{'right':>7}{'broken':>8}"]
    return "\n".join(lines + [f"{name:<50}{right[name]:>7}{broken[name]:>8}" for name in sorted(right | broken)])


def show_losses(game: Game) -> str:
    batch = random_batch(game.config, batch=3, seq=7, seed=12)

    def loss(group: Group) -> float:
        return finished(game, make_site(group, dtype="float64")).loss_forward(batch)[0]

    with game.fault.planted():
        return "\n".join(f"{ranks} rank(s)  {run_threads(ranks, loss)[0]:.12f}" for ranks in (1, 2, 3))


def show_types(game: Game) -> str:
    return "they tell: a pair is missing, doubled or of another kind" if game.fault.types else "they see nothing"


TOOLS: dict[str, tuple[int, Callable[[Game], str]]] = {
    "verify": (1, show_verify),
    "table": (1, show_table),
    "ledger": (1, show_ledger),
    "losses": (1, show_losses),
    "types": (2, show_types),
}


def play(number: str | None, lines: Iterator[str]) -> None:
    """One fault, until it is named or the answers end."""
    game = Game(int(number or random.randint(1, len(NAMES))))
    offered = dict(zip("abc", choices(game.number), strict=True))
    print(f"Fault {game.number} is planted in a {game.config.model_type} model on {RANKS} ranks. {START} points.\n")
    print(HELP + "\n")
    print("\n".join(f"  {letter}  {mistake}" for letter, mistake in offered.items()))
    for line in lines:
        if line == "end":
            break
        if line in offered:
            if answered(game, offered[line]):
                return
            del offered[line]
        elif line in TOOLS:
            cost, show = TOOLS[line]
            if line not in game.seen:
                game.points, game.seen = game.points - cost, game.seen | {line}
            print(f"{show(game)}\n\n{max(game.points, 0)} points left")
        else:
            print(HELP)
    print(f"It is: {game.fault.mistake}\nSCORE  0 of {START}")


def answered(game: Game, mistake: str) -> bool:
    """Whether it is the one; says so, and why."""
    if mistake == game.fault.mistake:
        first = ", ".join(f"{KINDS[kind]} of {name}" for kind, name in game.fault.seen.items())
        print(f"Right: {NAMES[game.number - 1]}. It shows first in: {first}.")
        print(f"SCORE  {max(game.points, 0)} of {START}")
        return True
    game.points -= WRONG
    elsewhere = next(fault for fault in FAULTS.values() if fault.mistake == mistake)
    first = ", ".join(f"{KINDS[kind]} of {name}" for kind, name in elsewhere.seen.items())
    print(f"No: that one would show first in: {first}. {max(game.points, 0)} points left")
    return False
