"""`mpitp step --sequence-parallel`: token shards, and the collectives between them, as they are."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.step.film import Film
from mpitp.step.mesh_pass import Layout
from mpitp.step.screen import whole_op
from mpitp.step.source import Wish, make_film
from tests.step.test_letters import CLOSE
from tests.step.test_record import values


def ranks_values(film: Film, number: int, place: int) -> list[np.ndarray]:
    array = film.op(number).arrays[place]
    return [values(array, rank) for rank in range(film.ranks)]


@pytest.mark.parametrize(("preset", "ranks"), [("llama", 3), ("gpt2", 2)])
def test_collectives_make_of_shards_what_they_say(preset: str, ranks: int) -> None:
    film = make_film(Wish(preset=preset, ranks=ranks, layout=Layout(sequence_parallel=True)))
    assert "sequence-parallel" in film.title
    kinds = {"all_gather": 0, "reduce_scatter": 0}
    for op in film.ops:
        kind = op.collective.partition(" ")[0]
        if kind not in kinds:
            continue
        kinds[kind] += 1
        given, made = ranks_values(film, op.number, 0), ranks_values(film, op.number, 1)
        letters = [array.letter for array in op.arrays]
        if kind == "all_gather":
            assert letters == ["V", "R"]
            for whole in made:
                np.testing.assert_array_equal(np.concatenate(given), whole)
        else:
            assert letters == ["P", "V"]
            np.testing.assert_allclose(np.concatenate(made), np.sum(given, axis=0), **CLOSE)
    assert kinds == {"all_gather": 6, "reduce_scatter": 6}


def test_a_pair_is_told_and_linked_to_its_conjugate() -> None:
    film = make_film(Wish(preset="gpt2", ranks=2, layout=Layout(sequence_parallel=True)))
    gather = next(op for op in film.ops if op.layer == "blocks.0.attention.qkv" and op.collective)
    assert "GatherFromSP: all-gather of rows forward" in "\n".join(whole_op(film, gather))
    assert gather.conjugate is not None and film.op(gather.conjugate).collective.startswith("reduce_scatter")
