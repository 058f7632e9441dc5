"""Films made once for all tests of the stepper."""

from __future__ import annotations

from functools import cache

from mpitp.step.film import Film
from mpitp.step.source import Wish, make_film


@cache
def film_of(preset: str = "llama", ranks: int = 3) -> Film:
    return make_film(Wish(preset=preset, ranks=ranks))
