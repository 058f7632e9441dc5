"""What breaks, as a game: a fault is planted in a small model, tools show what it does, and you say what it is.

The first faults are mistakes of tensor parallelism (`planted_bugs.py`), on 2 ranks; those behind them are made where
several axes meet (`planted_layout_bugs.py`): a placement that isn't true, a conjugate that is missing or another one, a
wrong share. The last are of mixtures of experts (`planted_mixture_bugs.py`): routers that don't learn from all tokens,
auxiliary losses that change with the layout, scores and rows in the wrong place. You begin with 10 points; a tool costs
one or two, a wrong answer three. `python examples/check.py breaks` takes one by chance, `breaks 7` number 7.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mpitp.verify.run
from examples import layout_breaks as layouts
from examples.planted_bugs import FAULTS, GPT2, LLAMA, Fault
from examples.planted_layout_bugs import LAYOUT_FAULTS, LayoutFault
from examples.planted_mixture_bugs import MIXTURE_FAULTS
from mpitp.comm import Group, run_threads
from mpitp.comm.observed import ObservedGroup
from mpitp.errors import PlacementError
from mpitp.layers import Site, make_site
from mpitp.models import CausalLM, config_from_hf, new_model
from mpitp.models.config import Dropouts
from mpitp.verify.command import default_tolerance
from mpitp.verify.report import KINDS, summary
from mpitp.verify.run import Report, Settings, verify
from mpitp.verify.source import random_batch, shake

RANKS, START, WRONG = 2, 10, 3
KINDS_OF_FAULTS: tuple[Mapping[str, Fault | LayoutFault], ...] = (FAULTS, LAYOUT_FAULTS, MIXTURE_FAULTS)
EVERY = {name: fault for kind in KINDS_OF_FAULTS for name, fault in kind.items()}
NAMES = tuple(EVERY)
NUMBERS = tuple(str(number) for number in range(1, len(NAMES) + 1))
HELP = """\
verify     which rows of `mpitp verify` differ first, in each order      costs 1
table      the first twelve rows that differ                             costs 1
ledger     collectives of both passes, right and broken                  costs 1
losses     the loss of the broken model, and that on 1 rank              costs 1
types      whether the types would have told beforehand                  costs 2
a, b, c    your answer: which mistake                              wrong costs 3
end        stop"""


@dataclass
class Game:
    """One fault, the points that are left, and what has been looked at already."""

    number: int
    points: int = START
    report: Report | PlacementError | None = None
    seen: set[str] = field(default_factory=set)

    @property
    def fault(self) -> Any:
        """The one that is planted."""
        return EVERY[NAMES[self.number - 1]]

    @property
    def where(self) -> str:
        """The model and its ranks, in words."""
        return f"{self.config.model_type}, tp {RANKS}"

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

    def verified(self) -> Report | PlacementError:
        """What `mpitp verify` finds with the fault in place, or how the types refuse it."""
        if self.report is None:
            with self.fault.planted():
                self.report = self.verify()
        return self.report

    def verify(self) -> Report | PlacementError:
        """The model in its layout against that on one rank."""
        settings = Settings(default_tolerance("float64", is_exact=False), steps=1)
        batch = random_batch(self.config, batch=3, seq=7, seed=12)

        def run(group: Group) -> Report:
            return verify(make_site(group, dtype="float64"), self.make, batch, settings)

        return run_threads(RANKS, run)[0]

    def calls(self) -> Mapping[str, int]:
        """Rank 0's collectives of a forward and a backward pass."""
        batch = random_batch(self.config, batch=3, seq=7, seed=12)

        def run(group: Group) -> Counter[str]:
            count = layouts.Count()
            model = finished(self, make_site(ObservedGroup(group, count), dtype="float64"))
            count.calls.clear()
            _, ctx = model.loss_forward(batch)
            model.loss_backward(ctx, 1.0)
            return count.calls

        return run_threads(RANKS, run)[0]

    def losses(self) -> list[str]:
        """Of the broken model at several numbers of ranks, a line each."""
        batch = random_batch(self.config, batch=3, seq=7, seed=12)

        def loss(group: Group) -> float:
            return finished(self, make_site(group, dtype="float64")).loss_forward(batch)[0]

        return [f"{ranks} rank(s)  {run_threads(ranks, loss)[0]:.12f}" for ranks in (1, 2, 3)]

    @property
    def is_refused(self) -> bool:
        """Whether types tell before anything runs."""
        return bool(self.fault.types)


class LayoutGame(Game):
    """A fault where several axes meet."""

    @property
    def where(self) -> str:
        return layouts.layout_in_words(self.fault)

    def verify(self) -> Report | PlacementError:
        try:
            return layouts.verified(self.fault)
        except PlacementError as refused:
            return refused

    def calls(self) -> Mapping[str, int]:
        try:
            return layouts.calls_of(self.fault)
        except PlacementError:
            return {}

    def losses(self) -> list[str]:
        try:
            found = zip(*layouts.losses_of(self.fault), strict=True)
        except PlacementError as refused:
            return [str(refused)]
        return [
            f"step {step}: 1 rank {alone:.12f}, the layout {own:.12f}" for step, (alone, own) in enumerate(found, 1)
        ]

    @property
    def is_refused(self) -> bool:
        return "types" in self.fault.seen


def game_of(number: int) -> Game:
    """A new game of the fault of this number."""
    return (Game if number <= len(FAULTS) else LayoutGame)(number)


def choices(number: int) -> list[str]:
    """The mistake that is planted and two that show elsewhere, in an order of the number's own."""
    name, order = NAMES[number - 1], random.Random(number)
    fault, kind = EVERY[name], next(kind for kind in KINDS_OF_FAULTS if name in kind)
    others = sorted({each.mistake for each in kind.values() if each.seen != fault.seen})
    picked = [fault.mistake, *order.sample(others, 2)]
    order.shuffle(picked)
    return picked


def show_verify(game: Game) -> str:
    found = game.verified()
    return f"refused: {found}" if isinstance(found, PlacementError) else summary(found, [], RANKS)


def show_table(game: Game) -> str:
    found = game.verified()
    if isinstance(found, PlacementError):
        return "no row: the types refuse the model before anything is computed"
    rows = [row for row in found.rows if not row.ok]
    lines = [f"{row.name:<30}{KINDS[row.kind]:<26}{row.largest_rel:9.1e}" for row in rows[:12]]
    return "\n".join([*lines, f"... and {len(rows) - 12} more"] if len(rows) > 12 else lines)


def finished(game: Game, site: Site) -> CausalLM:
    """The model, damaged where the fault is one of models and planted: that happens when `verify` begins to look."""
    model = game.make(site)
    mpitp.verify.run.record_layers(model).is_open = False
    return model


def show_ledger(game: Game) -> str:
    right = game.calls()
    with game.fault.planted():
        broken = game.calls()
    if not broken:
        return "nothing runs: the types refuse the model"
    names = sorted({*right, *broken})
    width = max(50, *(len(name) + 2 for name in names))
    lines = [f"{'collective':<{width}}{'right':>7}{'broken':>8}"]
    return "\n".join(lines + [f"{name:<{width}}{right.get(name, 0):>7}{broken.get(name, 0):>8}" for name in names])


def show_losses(game: Game) -> str:
    with game.fault.planted():
        return "\n".join(game.losses())


def show_types(game: Game) -> str:
    return "they tell: the composition isn't one of true types" if game.is_refused else "they see nothing"


TOOLS: dict[str, tuple[int, Callable[[Game], str]]] = {
    "verify": (1, show_verify),
    "table": (1, show_table),
    "ledger": (1, show_ledger),
    "losses": (1, show_losses),
    "types": (2, show_types),
}


def play(number: str | None, lines: Iterator[str]) -> None:
    """One fault, until it is named or the answers end."""
    game = game_of(int(number or random.randint(1, len(NAMES))))
    offered = dict(zip("abc", choices(game.number), strict=True))
    print(f"Fault {game.number} of {len(NAMES)} is planted: {game.where}. {START} points.\n")
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
        print(f"Right: {NAMES[game.number - 1]}. It shows first in: {first_of(game.fault)}.")
        print(f"SCORE  {max(game.points, 0)} of {START}")
        return True
    game.points -= WRONG
    elsewhere = next(fault for fault in EVERY.values() if fault.mistake == mistake)
    print(f"No: that one would show first in: {first_of(elsewhere)}. {max(game.points, 0)} points left")
    return False


def first_of(fault: Fault | LayoutFault) -> str:
    """Where it shows first, in each order."""
    return ", ".join(f"{KINDS.get(kind, 'the types')} of {name}" for kind, name in fault.seen.items())
