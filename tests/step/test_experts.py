"""`mpitp step` of a mixture of experts: who sends which rows to whom, and what comes of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.step.film import Film, Op
from mpitp.step.mesh_pass import Layout
from mpitp.step.source import Wish, make_film
from mpitp.step.tour import guide
from tests.step.test_letters import CLOSE
from tests.step.test_record import named, values

EXPERTS, ROUTER, MIXTURE = "blocks.0.mlp.experts", "blocks.0.mlp.router", "blocks.0.mlp"
SHARED = ("model_type=qwen2_moe", "num_experts=3", "moe_intermediate_size=3", "shared_expert_intermediate_size=3")


@cache
def film_on(ep: int, tp: int = 1, *, sp: bool = False, overrides: tuple[str, ...] = ()) -> Film:
    layout = Layout(ep=ep, sequence_parallel=sp)
    return make_film(Wish(preset="mixtral", ranks=ep * tp, layout=layout, overrides=overrides))


def ops_of(film: Film, layer: str, phase: str, collective: str = "") -> list[Op]:
    return [
        op
        for op in film.ops
        if op.layer == layer and op.phase == phase and op.collective.partition(" ")[0] == collective
    ]


@pytest.mark.parametrize("ep", [2, 3, 5])
def test_rows_arrive_where_their_experts_are(ep: int) -> None:
    film = film_on(ep)
    counts, there, back = ops_of(film, EXPERTS, "forward", "all_to_all")
    assert [op.axis for op in (counts, there, back)] == ["ep"] * 3
    goes = ops_of(film, EXPERTS, "forward")[-1]
    sent, arrived = [], []
    for rank in range(ep):
        where, rows = values(named(goes, "token, expert, rank"), rank).astype(int), values(there.arrays[0], rank)
        chosen = values(named(ops_of(film, ROUTER, "forward")[0], "c"), rank).astype(int)
        assert sorted((token, expert) for token, row in enumerate(chosen) for expert in row) == sorted(
            (token, expert) for token, expert, _ in where.tolist()
        )
        np.testing.assert_array_equal(rows, values(named(goes, "x"), rank)[where[:, 0]])
        sent += [(dest, rank, *row) for (_, _, dest), row in zip(where.tolist(), rows.tolist(), strict=True)]
        arrived += [(rank, *row) for row in values(there.arrays[1], rank).reshape(-1, 4).tolist()]
    assert sorted((dest, *row) for dest, _, *row in sent) == sorted(arrived)


def test_one_rank_and_ranks_of_experts_make_the_same() -> None:
    """What ranks of tp = 3 make of experts' columns is summed, and so is the gradient of the scores."""
    alone, cut = film_on(1), film_on(1, 3)
    for phase, layer, name in (("forward", EXPERTS, "y"), ("backward", EXPERTS, "dx"), ("backward", MIXTURE, "dx")):
        found = [op for op in cut.ops if (op.layer, op.phase) == (layer, phase) and op.made.name == name][0]
        expected = [op for op in alone.ops if (op.layer, op.phase) == (layer, phase) and op.made.name == name][0]
        np.testing.assert_allclose(values(named(found, name), 0), values(named(expected, name), 0), **CLOSE)
    ds = ops_of(cut, EXPERTS, "backward", "all_reduce")[1]
    partial = sum(values(named(ds, "ds_partial"), rank) for rank in range(3))
    np.testing.assert_allclose(values(named(ds, "ds"), 0), partial, **CLOSE)


def test_token_shards_are_gathered_with_their_scores_and_choices() -> None:
    film = film_on(1, 2, sp=True)
    gathered = ops_of(film, EXPERTS, "forward", "all_gather")
    assert [op.made.name for op in gathered] == ["x", "s", "c"]
    assert values(gathered[2].made, 0).tolist() == values(gathered[2].made, 1).tolist()


def test_a_shared_expert_runs_while_rows_travel() -> None:
    film = film_on(2, overrides=SHARED)
    numbers = [op.number for op in film.ops if op.phase == "forward" and ".mlp.shared" in op.layer]
    _, there, back = ops_of(film, EXPERTS, "forward", "all_to_all")
    assert there.number < min(numbers) <= max(numbers) < back.number
    whole = ops_of(film, MIXTURE, "forward")[0]
    for rank in range(2):
        made = values(named(whole, "experts"), rank) + values(named(whole, "shared"), rank)
        np.testing.assert_allclose(values(named(whole, "y"), rank), made, **CLOSE)


def test_the_tour_has_a_chapter_of_experts() -> None:
    film = film_on(2, overrides=SHARED)
    for op in film.ops:
        if op.layer.startswith(MIXTURE) and "shared.mlp" not in op.layer:
            assert guide(op).chapter == "experts", op.layer
            assert guide(op).examples == ("17_experts_and_all_to_all.py",)


def test_a_page_and_a_list_of_them(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--preset", "mixtral", "--ep", "2", "--html", f"{tmp_path}/out.html"]) == 0
    assert main(["step", "--preset", "mixtral", "--ep", "2", "--list"]) == 0
    told = capsys.readouterr().out
    assert "3 experts dealt 2+1 over ep, 2 a token" in told
    assert "all_to_all" in told


def test_a_model_without_experts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--ep", "2", "--list"]) == 2
    assert "a llama has none" in capsys.readouterr().err
