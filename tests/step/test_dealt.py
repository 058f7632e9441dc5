"""`mpitp step --zero 3`: weights gathered for each layer, gradients scattered to those who keep the rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.step.film import WEIGHTS, Film, Op
from mpitp.step.mesh_pass import Layout
from mpitp.step.source import Wish, make_film
from mpitp.step.tour import guide
from tests.step.test_letters import CLOSE
from tests.step.test_record import named, values
from tests.step.test_schedules import updates

PAIRS = (0, 2), (1, 3)  # ranks of dp 2 x tp 2 that hold the same piece of a layer


@cache
def film_with(zero: int, preset: str = "llama") -> Film:
    return make_film(Wish(preset=preset, ranks=4, layout=Layout(dp=2, microbatches=2, zero=zero)))


def moves_of(film: Film, kind: str, phase: str) -> list[Op]:
    return [op for op in film.ops if op.collective == kind and op.phase == phase and op.axis == "dp"]


@pytest.mark.parametrize("preset", ["llama", "qwen2", "bert"])
def test_the_step_is_that_of_whole_weights(preset: str) -> None:
    plain, film = updates(film_with(0, preset)), updates(film_with(3, preset))
    assert set(plain) == set(film)
    for layer, op in film.items():
        assert dict(named(op, "W_new").letters)["dp"] == "V"
        for name in ("g", "W_new"):
            for low, high in PAIRS if named(plain[layer], name).pictures[0].is_whole else ():
                rows = np.concatenate([values(named(op, name), rank) for rank in (low, high)])
                np.testing.assert_allclose(rows, values(named(plain[layer], name), low), **CLOSE)


def test_weights_are_gathered_in_both_passes_and_gradients_scattered() -> None:
    film = film_with(3)
    names = {op.layer.removeprefix("update.") for op in updates(film).values()}
    for phase in ("forward", "backward"):
        gathers = moves_of(film, "all_gather", phase)
        assert {op.layer for op in gathers} == names and len(gathers) == 2 * len(names)
        assert {op.microbatch for op in gathers} == {0, 1} and all(op.subject == WEIGHTS for op in gathers)
        for op in gathers:
            for low, high in PAIRS:
                rows = np.concatenate([values(op.arrays[0], rank) for rank in (low, high)])
                np.testing.assert_array_equal(values(op.made, low), rows)
    scatters = moves_of(film, "reduce_scatter", "backward")
    assert {op.layer for op in scatters} == names and len(scatters) == 2 * len(names)
    for op in scatters:
        for low, high in PAIRS:
            rows = np.concatenate([values(op.made, rank) for rank in (low, high)])
            whole = values(op.arrays[0], low) + values(op.arrays[0], high)
            np.testing.assert_allclose(rows.reshape(whole.shape), whole, **CLOSE)
    assert not any(op.collective for op in film.ops if op.layer == "update.weights")


def test_a_layer_s_weights_come_before_it_runs_and_its_conjugate_is_the_scatter() -> None:
    film = film_with(3)
    for op in moves_of(film, "all_gather", "forward"):
        top = op.layer if op.layer.count(".") == 1 else op.layer.rpartition(".")[0]
        layer = top.rpartition(".")[0] if op.layer.count(".") == 1 else top
        runs = [each for each in film.ops if each.layer == layer and each.phase == "forward" and not each.collective]
        assert op.number < min(each.number for each in runs if each.microbatch == op.microbatch)
        assert op.conjugate is not None
        other = film.op(op.conjugate)
        assert (other.collective, other.layer, other.microbatch) == ("reduce_scatter", op.layer, op.microbatch)
        assert other.conjugate == op.number and guide(op).chapter == guide(other).chapter == "replicas"
    assert all(op.conjugate is None for op in moves_of(film, "all_gather", "backward"))
    first = {op.layer.partition(".")[0]: op.number for op in reversed(film.ops) if op.collective == "all_gather"}
    embedding = next(op for op in film.ops if op.layer == "embedding" and not op.collective)
    assert first["blocks"] < embedding.number  # the block's weights come while the embedding runs


def test_memory_is_that_of_rows_and_of_what_runs() -> None:
    plain, film = film_with(0), film_with(3)
    end, whole = film.ops[-1].memory, plain.ops[-1].memory
    for low, high in PAIRS:
        for part in ("params", "grads", "moments"):
            assert getattr(end[low], part) + getattr(end[high], part) == getattr(whole[low], part)
    most = [max(op.memory[rank].params for op in film.ops) for rank in range(4)]
    assert all(end[rank].params < most[rank] for rank in range(4))


def test_it_is_told_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--dp", "2", "--zero", "3", "--list"]) == 0
    told = capsys.readouterr().out
    assert "ZeRO-3" in told and "all_gather" in told and "reduce_scatter" in told
    assert main(["step", "--pp", "2", "--dp", "2", "--zero", "3", "--schedule", "zb", "--list"]) == 2
    assert "whole weights are gone; take another schedule, or --zero 2" in capsys.readouterr().err
    assert main(["step", "--dp", "2", "--zero", "3", "--invariant", "--list"]) == 2
    assert "--zero 1 has it" in capsys.readouterr().err
