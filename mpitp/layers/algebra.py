"""What a layer computes, told as data: the equations of its docstring, step by step, for whoever shows a pass.

A pass of a layer is a row of steps: a `Segment` is what a rank does by itself, a `Sum` what a collective makes of it, a
`Move` an all-to-all with the work before it, a `Join` the place where a layer that is made of others adds what went
past them. W_r, x_r: what rank r holds of it.
No layer computes by this: the stepper shows it, and plans find ends and residual sums by it. A layer without an algebra
is told by its class and docstring.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LETTERS = {"weight": "W", "bias": "b"}  # of parameters, in equations
UNITS = {  # what is dealt where a part of this name is cut
    **dict.fromkeys(("q", "k", "v", "o", "out"), "heads"),
    **dict.fromkeys(("gate", "up", "down"), "FFN columns"),
    "vocab": "vocabulary",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A rank's own work. `inputs`: names of what to show of what it uses; `output`: the name of what it makes.

    `grads`: whether parameters' gradients are among that. `needs`: the array without which it isn't done.
    What stands in braces in an equation is only there with a bias b.
    """

    equation: str
    inputs: str
    output: str = ""
    note: str = ""
    grads: bool = False
    needs: str = ""

    def equation_of(self, has_bias: bool) -> str:
        """The equation, with the terms in braces or without them."""
        return re.sub(r"\{(.*?)\}", r"\1" if has_bias else "", self.equation)


@dataclass(frozen=True, slots=True)
class Sum:
    """A collective, of what the segment before it makes. It may come several times in a row, or not at all."""

    makes: str
    equation: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """An all-to-all of what `before` makes (None: of what is there): `makes` is what has come."""

    before: Segment | None
    makes: str
    equation: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """Where what went past meets what was made: before the first of the layers `before` that comes, or at the end.

    `past`: what went past is what the first of these layers that there is was given; (): what the block itself was, or
    the sum before.
    """

    name: str
    segment: Segment
    before: tuple[str, ...] = ()
    past: tuple[str, ...] = ()


ADD = Segment("y = x + branch", "x branch", "y", "row by row: no communication")
ADD_GRADS = Segment("dx = dy + dbranch", "dy dbranch", "dx", "x was used twice: by the branch and past it")


@dataclass(frozen=True, slots=True)
class Algebra:
    """The steps of both passes. `pair` says what they communicate: each is the other's conjugate.

    `entry`, `exit`: attributes of the layer with the pairs that x goes through before its product, and y behind it.
    `gathered`: what is gathered beside x, where rows of tokens are cut.
    `names`: how the equations call x, y, dx, dy and parameters, where it isn't x, y, dx, dy, W and b. `beside`: what
    they call the arrays that forward takes behind x, which have the letters of what it gives.
    """

    title: str
    forward: tuple[Segment | Sum | Move | Join, ...] = ()
    backward: tuple[Segment | Sum | Move | Join, ...] = ()
    pair: str = ""
    entry: str = ""
    exit: str = ""
    gathered: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    def name(self, array: str) -> str:
        """How the equations call x, y, dx, dy or a parameter."""
        return self.names.get(array, _LETTERS.get(array, array))
