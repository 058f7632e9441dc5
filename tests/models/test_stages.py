"""A model cut into stages: who gets which layers, and that all stages together are the whole model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.load import ModelSource
from mpitp.comm import Group, abstract_mesh, make_mesh, run_threads
from mpitp.errors import ConfigError
from mpitp.layers.site import make_site
from mpitp.models import abstract_model, build_model, new_model
from mpitp.models.stages import Costs, Cutting, deal_by_cost
from tests.models.model_cases import CONFIGS, RAW
from tests.sharded import assert_same_bits, fill, weights


def brute_force(costs: Costs, parts: int, weights: tuple[float, ...] = (1.0,)) -> tuple[float, float]:
    """The cheapest dearest part, and the smallest sum of squares of all dealings that have it."""
    count, found = len(costs.blocks), []
    for cuts in itertools.combinations_with_replacement(range(count + 1), parts - 1):
        bounds = [0, *cuts, count]
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        if min(sizes[:-1], default=1) >= 1:
            sums = [sum(costs.blocks[start:stop]) for start, stop in itertools.pairwise(bounds)]
            sums[0], sums[-1] = sums[0] + costs.first, sums[-1] + costs.last
            sums = [x / weights[i % len(weights)] for i, x in enumerate(sums)]
            found.append((max(sums), sum(x**2 for x in sums)))
    return min(found)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.1, 5.0), (3.0, 1.0), (0.0, 20.0)])
def test_blocks_are_dealt_by_cost(parts: int, ends: tuple[float, float]) -> None:
    for blocks in ((1.0,) * 7, (1.0, 2.0, 5.0, 1.0, 3.0, 2.0)):
        costs = Costs(ends[0], blocks, ends[1])
        counts = deal_by_cost(costs, parts)
        assert sum(counts) == len(blocks)
        stops = list(itertools.accumulate(counts, initial=0))
        sums = [sum(blocks[start:stop]) for start, stop in itertools.pairwise(stops)]
        sums[0], sums[-1] = sums[0] + costs.first, sums[-1] + costs.last
        assert (max(sums), sum(x**2 for x in sums)) == pytest.approx(brute_force(costs, parts))


@pytest.mark.parametrize("weights", [(1.0, 2.0), (3.0, 1.0), (0.5, 0.5), (1.0, 2.0, 0.25)])
def test_blocks_are_dealt_by_cost_and_by_weight(weights: tuple[float, ...]) -> None:
    """Part i is on stage i mod stages: of two stages with two parts each, the first has parts 0 and 2."""
    costs = Costs(0.5, (1.0, 2.0, 5.0, 1.0, 3.0, 2.0), 2.0)
    for parts in (len(weights), 2 * len(weights)):
        stops = list(itertools.accumulate(deal_by_cost(costs, parts, weights), initial=0))
        sums = [sum(costs.blocks[start:stop]) for start, stop in itertools.pairwise(stops)]
        sums[0], sums[-1] = sums[0] + costs.first, sums[-1] + costs.last
        seconds = [x / weights[i % len(weights)] for i, x in enumerate(sums)]
        assert (max(seconds), sum(x**2 for x in seconds)) == pytest.approx(brute_force(costs, parts, weights))


def test_a_slow_stage_has_fewer_blocks() -> None:
    costs = Costs(0.0, (1.0,) * 9, 0.0)
    assert Cutting().deal(costs, 2, (2.0, 1.0)) == (range(6), range(6, 9))
    assert Cutting(1, (8, 1)).deal(costs, 2) == (range(8), range(8, 9))
    with pytest.raises(
        ConfigError, match=r"mesh.stages = \[8, 1\] says .*, and so does mesh.shares along pp = \[2.0, 1"
    ):
        Cutting(1, (8, 1)).deal(costs, 2, (2.0, 1.0))


def test_a_heavy_head_stands_alone() -> None:
    assert deal_by_cost(Costs(0.0, (1.0,) * 4, 5.0), 2) == (4, 0)
    assert deal_by_cost(Costs(0.0, (1.0,) * 8, 1.0), 3) == (3, 3, 2)


EVEN = Costs(1.0, (1.0,) * 6, 1.0)


@pytest.mark.parametrize(
    ("cutting", "stages", "words"),
    [
        (Cutting(), 7, "mesh.pp = 7 stages of at least one block each, but the model has 6; use mesh.pp = 6 or fewer"),
        (Cutting(2), 4, "4 stages x mesh.chunks = 2 = 8 parts .* the model has 6; use mesh.schedule = .1f1b."),
        (Cutting(4), 2, "2 stages x mesh.chunks = 4 = 8 parts .* the model has 6; use mesh.chunks = 3, or fewer"),
        (Cutting(1, (3, 3)), 3, r"mesh.stages = \[3, 3\] names the blocks of 2 parts, but mesh.pp = 3 makes 3"),
        (Cutting(2, (3, 3)), 2, "2 parts, but mesh.pp = 2 x mesh.chunks = 2 makes 4"),
        (Cutting(1, (3, 4)), 2, r"3 \+ 4 = 7 blocks, the model has 6 .* use such as \[3, 3\], or leave"),
        (Cutting(1, (3, 0, 3)), 3, r"only the first and last part may have none\); use such as \[2, 2, 2\]"),
    ],
)
def test_what_cannot_be_dealt_is_refused(cutting: Cutting, stages: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cutting.deal(EVEN, stages)


def test_a_list_is_taken_as_it_is() -> None:
    assert Cutting(1, (1, 5)).deal(EVEN, 2) == (range(1), range(1, 6))
    assert Cutting(1, (0, 6, 0)).deal(EVEN, 3) == (range(0), range(6), range(6, 6))


def test_layers_of_each_stage() -> None:
    config = CONFIGS["gpt2"]
    stages = [abstract_model(config, make_site(abstract_mesh({"pp": 2, "tp": 2}, rank))) for rank in (0, 1, 2)]
    first = ["embedding", "positions", "embedding dropout", "blocks.0"]
    assert [list(model.layers) for model in stages] == [first, first, ["blocks.1", "final_norm", "head"]]
    assert "loss" in stages[2].all_layers() and "loss" not in stages[0].all_layers()
    assert list(stages[2].types())[0] == "blocks.1" and "loss" in stages[2].types()


def stage_model(world: Group, name: str, mesh: dict[str, int], cutting: Cutting = Cutting()) -> Any:  # noqa: B008
    return new_model(CONFIGS[name], make_site(make_mesh(world, mesh)), seed=3, cutting=cutting)


MESHES = [({"pp": 2}, Cutting()), ({"pp": 2, "tp": 2}, Cutting(1, (2, 0))), ({"pp": 3}, Cutting(1, (1, 1, 0)))]


@pytest.mark.parametrize(("mesh", "cutting"), MESHES)
@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "llama 9/3", "qwen2 6/2, tied"])
def test_stages_together_are_the_model(name: str, mesh: dict[str, int], cutting: Cutting) -> None:
    """Fresh weights are those of one rank, every element has one owner, and a tied head has the embedding's bits."""

    def rank(world: Group) -> dict[str, Any]:
        return weights(world, stage_model(world, name, mesh, cutting).named_params())

    found = run_threads(mesh["pp"] * mesh.get("tp", 1), rank)[-1]
    assert_same_bits(
        found, run_threads(1, lambda world: weights(world, stage_model(world, name, {}).named_params()))[0]
    )


@pytest.mark.parametrize("name", ["gpt2", "llama 9/3"])
def test_stages_save_and_load_the_whole_model(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]

    def save(world: Group) -> dict[str, Any]:
        model = build_model(config, make_site(make_mesh(world, {"pp": 2, "tp": 1})))
        fill(model.named_params())
        save_model(model, tmp_path / "model", world, Documents(RAW[name]))
        return weights(world, model.named_params())

    def load(world: Group, mesh: dict[str, int]) -> dict[str, Any]:
        model = ModelSource(config, tmp_path / "model").make(make_site(make_mesh(world, mesh)))
        return weights(world, model.named_params())

    saved = run_threads(2, save)[0]
    for mesh in ({}, {"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}):
        ranks = mesh.get("pp", 1) * mesh.get("tp", 1)
        assert_same_bits(run_threads(ranks, load, mesh)[0], saved)
