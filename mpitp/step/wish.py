"""What is to be stepped through, as the command line says it, and what that comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpitp.layers.site import Site
from mpitp.models.any_config import AnyConfig
from mpitp.models.batch import Batch
from mpitp.models.layered import LayeredModel
from mpitp.step.mesh_pass import Layout


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says; `model` is a directory, of which one block is taken (of a pipeline one a stage).

    `invariant`: the mode that is equal to the last bit in all layouts. `ranks`: None for as many as the layout's axes
    beside tp have, and 3 where it has none.
    """

    ranks: int | None = 3
    preset: str = "llama"
    config: str | None = None
    overrides: tuple[str, ...] = ()
    model: str | None = None
    block: int = 0
    tokens: int | None = None
    text: str | None = None
    layout: Layout = Layout()
    seed: int = 0
    invariant: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be made on any site, and what goes through it.

    `where`: what the title calls it; `facts`: how it is dealt; `words`: the text of token ids; `sizes`: for the page's
    sliders, {} where there are none; `first_block`: the number of the first block that the model was made with.
    """

    config: AnyConfig
    where: str
    make: Callable[[Site], LayeredModel]
    batches: list[Batch]
    facts: list[str]
    words: dict[int, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    first_block: int = 0
