"""Films of pipelines: whatever the schedule, the same gradients, the same update; what is put off, and what is held."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mpitp.pipeline.schedules import SCHEDULES
from mpitp.step.film import UPDATE, WEIGHT_GRADS, Film, Op
from mpitp.step.mesh_pass import Layout
from mpitp.step.page import page_of
from mpitp.step.rows import row_lines
from mpitp.step.source import Wish, make_film
from mpitp.step.tour import guide
from tests.step.browser import needs_chromium, walk_page
from tests.step.test_letters import CLOSE
from tests.step.test_record import named, values

FOUR_BLOCKS = ("num_hidden_layers=4",)


@cache
def film_by(schedule: str, microbatches: int = 4, cp: int = 1) -> Film:
    """Two stages; "none": one, and the same microbatches."""
    stages = 1 if schedule == "none" else 2
    layout = Layout(stages, cp=cp, schedule=schedule.replace("none", "1f1b"), microbatches=microbatches)
    return make_film(Wish(ranks=None if stages * cp > 1 else 1, overrides=FOUR_BLOCKS, layout=layout))


def updates(film: Film) -> dict[str, Op]:
    return {op.layer: op for op in film.ops if op.phase == UPDATE and op.title == "AdamW"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_in_the_same_update(schedule: str) -> None:
    film, plain = updates(film_by(schedule)), updates(film_by("none"))
    assert set(film) == set(plain) and len(film) > 20
    for layer, op in film.items():
        for name in ("g", "W_new"):
            np.testing.assert_allclose(values(named(op, name), 0), values(named(plain[layer], name), 0), **CLOSE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_of_a_microbatch_uses_what_its_forward_was_given(schedule: str) -> None:
    film, seen = film_by(schedule), 0
    forward = {(op.layer, op.microbatch): op for op in film.ops if op.phase == "forward" and not op.collective}
    for op in film.ops:
        if op.phase == "backward" and op.layer.endswith(("mlp.down", "attention.qkv")):
            for array in op.arrays:
                if array.name == "x":
                    assert array.pictures == named(forward[op.layer, op.microbatch], "x").pictures, op.number
                    seen += 1
    assert seen >= 4 * 4 * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_products_of_a_stage_of_one_rank_are_told_whole(schedule: str) -> None:
    """Where tp has one rank, nothing is summed: dx is told with dW, or, put off, before it."""
    ops = [op for op in film_by(schedule).ops if op.layer == "blocks.1.attention.qkv" and op.microbatch == 0]
    told = [op.equation for op in ops]
    halves = ["dx = dy_r W_r", "dW_r = dy_r^T x"]
    assert told[1:] == (halves if schedule == "zb" else [", ".join(halves)])
    dy, w, dx = (values(named(ops[1], name), 0) for name in ("dy", "W", "dx"))
    np.testing.assert_allclose(dx, dy @ w, rtol=2e-3, atol=5e-3)


def test_weight_gradients_that_are_put_off() -> None:
    film = film_by("zb")
    later = [op for op in film.ops if op.title == WEIGHT_GRADS]
    first = next(op for op in later if op.layer == "blocks.3.mlp.down")
    assert (first.microbatch, first.equation, guide(first).chapter) == (0, "dW_r = dy^T x_r", "pipeline")
    dy, x, dw = (values(named(first, name), 0) for name in ("dy", "x", "dW"))
    np.testing.assert_allclose(dw, dy.T @ x, rtol=2e-3, atol=5e-3)
    before = next(op for op in film.ops if op.layer == "blocks.3.mlp.down" and op.phase == "backward")
    assert before.equation == "dx_r = dy W_r" and not any(array.role == "grad" for array in before.arrays)
    assert {op.layer for op in later} >= {"embedding", "head", "blocks.0.norm1"}
    assert "wwww" in "".join(row_lines(film, 200))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_follows_the_schedule(schedule: str) -> None:
    film = film_by(schedule)
    own = [[op.memory[op.ranks.index(rank)].activations for op in film.ops if rank in op.ranks] for rank in (0, 1)]
    assert all(kept[-1] == 0 for kept in own)
    if schedule == "gpipe":
        assert max(own[0]) > 1.5 * max(film_rows("1f1b", 0))


def film_rows(schedule: str, rank: int) -> list[int]:
    return [op.memory[op.ranks.index(rank)].activations for op in film_by(schedule).ops if rank in op.ranks]


def test_the_norm_is_one_operation_of_all_stages() -> None:
    film = film_by("1f1b", 2, 2)
    (total,) = [op for op in film.ops if op.layer == "update.norm" and op.collective]
    assert (total.axis, total.ranks, total.groups) == ("pp+cp", [0, 1, 2, 3], [[0, 1, 2, 3]])
    given, made = total.arrays
    parts = np.stack([values(given, rank) for rank in range(4)])
    np.testing.assert_allclose(values(made, 0), parts.sum(axis=0), **CLOSE)
    clips = [op for op in film.ops if op.layer == "update.clip"]
    assert [op.ranks for op in clips] == [[0, 1], [2, 3]] and all(op.column == total.column + 1 for op in clips)
    norms = {float(picture.values[0][0]) for op in clips for picture in named(op, "norm").pictures}
    assert len(norms) == 1
    np.testing.assert_allclose(norms.pop() ** 2, values(made, 0).sum(), rtol=5e-3)


def test_parts_of_an_interleaved_pipeline_are_named() -> None:
    film = film_by("interleaved")
    sends = [op for op in film.ops if op.collective == "send"]
    assert {op.layer for op in sends} == {"parts 0-1", "parts 1-2", "parts 2-3"}
    for op in sends:
        assert op.conjugate is not None
        back = film.op(op.conjugate)
        assert (back.layer, back.microbatch, back.ranks, back.collective) == (op.layer, op.microbatch, op.ranks, "recv")


@needs_chromium
def test_page_of_a_schedule(tmp_path: Path) -> None:
    film = make_film(Wish(ranks=None, layout=Layout(2, schedule="zb")))
    walked = walk_page(tmp_path, page_of(film), 1366, 768)
    assert walked["errors"] == walked["faults"] == walked["below"] == []


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_updates_rows_and_gathers_the_others(zero: int) -> None:
    def made(level: int) -> Film:
        return make_film(Wish(ranks=4, layout=Layout(dp=2, microbatches=2, zero=level)))

    plain, film = made(0), made(zero)
    whole, rows = updates(plain), updates(film)
    for layer, op in rows.items():
        for tp in (0, 1):  # ranks tp and 2 + tp hold the same piece along dp
            parts = [values(named(op, "W_new"), rank) for rank in (tp, 2 + tp)]
            np.testing.assert_allclose(np.concatenate(parts), values(named(whole[layer], "W_new"), tp), **CLOSE)
        assert dict(named(op, "W_new").letters)["dp"] == "V"
    scatters = [op for op in film.ops if op.collective == "reduce_scatter"]
    assert [op.microbatch for op in scatters] == [[], [1], [0, 1]][zero]
    gather = film.ops[-1]
    assert (gather.layer, gather.collective, gather.axis) == ("update.weights", "all_gather", "dp")
    assert guide(gather).why.startswith("Each replica has the moments of its own rows")
    for rank in (0, 1):
        assert gather.made.pictures[rank] == gather.made.pictures[2 + rank]
        halves = [gather.arrays[0].pictures[place].shape[0] for place in (rank, 2 + rank)]
        assert sum(halves) == gather.made.pictures[rank].shape[0] and min(halves) > 0
    kept, full = gather.memory, plain.ops[-1].memory
    assert [kept[rank].moments + kept[2 + rank].moments for rank in (0, 1)] == [full[rank].moments for rank in (0, 1)]
