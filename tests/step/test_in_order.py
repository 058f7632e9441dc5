"""`mpitp step --invariant` on several axes: gradients added in the order of their microbatches, the same numbers."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.step.film import WEIGHT_GRADS, Film
from mpitp.step.mesh_pass import Layout
from mpitp.step.source import Wish, make_film, make_films
from mpitp.step.tour import guide
from tests.step.test_record import named, values
from tests.step.test_schedules import updates

TWO_BLOCKS = ("num_hidden_layers=2",)
LAYOUTS = {  # each with the same four sequences
    "alone": (1, Layout(microbatches=4)),
    "tp 2": (2, Layout(microbatches=4)),
    "dp 2": (2, Layout(dp=2, microbatches=2)),
    "dp 4, ZeRO-1": (4, Layout(dp=4, zero=1)),
    "pp 2": (2, Layout(pp=2, microbatches=4)),
    "pp 2, dp 2, tp 2": (8, Layout(pp=2, dp=2, microbatches=2, schedule="gpipe")),
}


@cache
def film_on(name: str) -> Film:
    ranks, layout = LAYOUTS[name]
    return make_film(Wish(preset="qwen2", ranks=ranks, overrides=TWO_BLOCKS, layout=layout, invariant=True))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "tp" not in name])
def test_every_update_is_the_same(name: str) -> None:
    alone, film = updates(film_on("alone")), updates(film_on(name))
    assert set(alone) == set(film)
    for layer, op in film.items():
        for array in ("g", "W_new"):
            parts = [values(named(op, array), place) for place in range(len(op.ranks))]
            whole = np.concatenate(parts) if "ZeRO" in name else parts[0]
            np.testing.assert_array_equal(whole, values(named(alone[layer], array), 0))


@pytest.mark.parametrize("name", ["tp 2", "pp 2, dp 2, tp 2"])
def test_the_norm_is_the_same_where_tensors_are_cut(name: str) -> None:
    norms = [
        {float(values(named(op, "norm"), 0).item()) for op in film.ops if op.layer == "update.clip"}
        for film in (film_on("alone"), film_on(name))
    ]
    assert norms[0] == norms[1] and len(norms[0]) == 1


@pytest.mark.parametrize("name", ["dp 2", "pp 2, dp 2, tp 2"])
def test_each_parameter_s_gradient_is_added_in_rounds(name: str) -> None:
    film = film_on(name)
    sums = [op for op in film.ops if op.collective.startswith("all_reduce_in_order") and op.axis == "dp"]
    params = {op.layer.removeprefix("update.") for op in updates(film).values()}
    assert {op.layer.removeprefix("gradients.") for op in sums} == params
    assert all(guide(op).why.startswith("The gradients of all microbatches") for op in sums)
    for op in sums:
        given, made = op.arrays
        for group in op.groups:
            places = [op.ranks.index(rank) for rank in group]
            rows = [values(given, place) for place in places]
            whole = values(made, places[0])
            # from the second round on the first rank hands in the sum so far, and its own
            total = sum(part.reshape(-1, *whole.shape).sum(axis=0) for part in rows)
            np.testing.assert_allclose(total, whole, rtol=2e-3, atol=5e-3)


def test_weight_gradients_of_stages_are_put_off_to_the_end() -> None:
    film = film_on("pp 2")
    later = [op.microbatch for op in film.ops if op.title == WEIGHT_GRADS and op.ranks == [0]]
    assert later == sorted(later) and set(later) == {0, 1, 2, 3}


def test_what_has_no_invariant_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "-n", "2", "--cp", "2", "--invariant", "--list"]) == 3
    assert "context parallelism has no invariant mode" in capsys.readouterr().err
    assert main(["step", "--preset", "mixtral", "--ep", "2", "--invariant", "--list"]) == 3
    assert "invariant mode has no mixture of experts" in capsys.readouterr().err
    assert main(["step", "--dp", "2", "--invariant", "--list"]) == 0
    assert "all_reduce_in_order" in capsys.readouterr().out


def test_a_page_has_both() -> None:
    films, left_out = make_films(Wish(layout=Layout(dp=2)), (2, 4))
    assert [(film.ranks, film.invariant) for film in films] == [(2, False), (2, True), (4, False), (4, True)]
    assert left_out == []
