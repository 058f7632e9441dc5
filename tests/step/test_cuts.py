"""The sliders' closed forms are what films have counted, for every preset and rank count."""

from __future__ import annotations

import pytest

from mpitp.layers.partition import share_heads
from mpitp.step.cuts import Sizes, cuts
from mpitp.step.film import UPDATE
from tests.step.films import film_of
from tests.step.test_record import LAYOUTS


@pytest.mark.parametrize(("preset", "ranks"), LAYOUTS)
def test_closed_forms_are_what_a_film_counts(preset: str, ranks: int) -> None:
    film = film_of(preset, ranks)
    told = cuts(Sizes(**film.sizes), ranks)
    held = [memory.params for memory in film.ops[0].memory]
    assert [cut.params * film.sizes["itemsize"] for cut in told] == held
    collectives = [op for op in film.ops if op.collective and op.phase != UPDATE]
    assert [cut.handed_bytes for cut in told] == [sum(op.given_bytes[r] for op in collectives) for r in range(ranks)]
    for rank, cut in enumerate(told):
        heads = share_heads(film.sizes["units"]["heads"], film.sizes["units"]["KV heads"], rank, ranks)
        assert (cut.query, cut.kv) == (heads.query.span, heads.kv)
    assert sum(len(cut.columns) for cut in told) == film.sizes["units"]["FFN columns"]
    assert sum(len(cut.vocabulary) for cut in told) == film.sizes["units"]["vocabulary"]
