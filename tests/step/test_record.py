"""What a film shows are the layers' own numbers: the sums of partials, the products of shards, alike in all layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.comm import SerialGroup
from mpitp.errors import ConfigError, UsageError
from mpitp.layers.site import make_site
from mpitp.models.registry import config_from_hf, new_model
from mpitp.step.film import PARTIAL, REPLICATED, SHARDED, UPDATE, Array, Film, Op
from mpitp.step.source import PRESETS, Wish, make_film
from tests.step.films import film_of

LAYOUTS = [(preset, ranks) for preset in PRESETS for ranks in (1, 2, 3, 5)]


def values(array: Array, rank: int) -> np.ndarray:
    return np.array(array.pictures[rank].values).reshape(array.pictures[rank].shape)


def named(op: Op, name: str) -> Array:
    return next(array for array in op.arrays if array.name == name)


def find(film: Film, layer: str, phase: str, collective: bool = False) -> Op:
    return next(op for op in film.ops if (op.layer, op.phase, bool(op.collective)) == (layer, phase, collective))


@pytest.mark.parametrize(("preset", "ranks"), LAYOUTS)
def test_collectives_sum_what_they_are_given(preset: str, ranks: int) -> None:
    film = film_of(preset, ranks)
    collectives = [op for op in film.ops if op.collective]
    assert len(collectives) >= 8
    for op in collectives:
        given, made = op.arrays
        together = np.stack([values(given, rank) for rank in range(ranks)])
        expected = together.max(axis=0) if op.collective == "all_reduce max" else together.sum(axis=0)
        for rank in range(ranks):
            np.testing.assert_allclose(values(made, rank), expected, rtol=2e-3, atol=2e-3)
        assert (given.placement, made.placement) == (PARTIAL, REPLICATED)
        assert op.given_bytes == [given.pictures[0].nbytes] * ranks


@pytest.mark.parametrize(("preset", "ranks"), LAYOUTS)
def test_placements_are_true(preset: str, ranks: int) -> None:
    for op in film_of(preset, ranks).ops:
        for array in op.arrays:
            shapes = {picture.shape for picture in array.pictures}
            if array.placement == REPLICATED:
                assert all(picture == array.pictures[0] for picture in array.pictures), (op.layer, array.name)
            if array.placement == PARTIAL:
                assert len(shapes) == 1


@pytest.mark.parametrize(("preset", "ranks"), LAYOUTS)
def test_every_layout_shows_the_same_replicated_numbers(preset: str, ranks: int) -> None:
    """Replicated results of the layers equal those of the one-rank model."""
    whole, cut = film_of(preset, 1), film_of(preset, ranks)
    seen = 0
    for op in cut.ops:
        made = op.made
        if made.placement != REPLICATED or made.role != "out" or made.name in ("dkv", "squares"):
            continue
        if not made.pictures[0].is_whole:
            continue
        same = find(whole, op.layer, op.phase, bool(op.collective)).made
        if same.name == made.name:
            np.testing.assert_allclose(values(made, 0), values(same, 0), rtol=2e-3, atol=2e-3)
            seen += 1
    assert seen > 12


def test_equations_hold_for_what_is_shown() -> None:
    film = film_of("llama", 3)
    for layer in ("blocks.0.attention.qkv", "blocks.0.mlp.gate_up", "head"):
        op = find(film, layer, "forward")
        for rank in range(3):
            x, w = values(named(op, "x"), rank), values(named(op, "W"), rank)
            np.testing.assert_allclose(values(op.made, rank), x @ w.T, rtol=5e-3, atol=5e-3)
    op = find(film, "blocks.0.mlp.activation", "forward")
    gate, up = np.split(values(named(op, "gate_up"), 0), 2, axis=1)
    np.testing.assert_allclose(values(op.made, 0), gate / (1 + np.exp(-gate)) * up, rtol=5e-3, atol=5e-3)
    op = find(film, "blocks.0.residual1", "backward")
    total = values(named(op, "dy"), 1) + values(named(op, "dbranch"), 1)
    np.testing.assert_allclose(values(op.made, 1), total, rtol=5e-3, atol=5e-3)


def test_order_and_conjugates() -> None:
    film = film_of("llama", 3)
    forward = [op.layer for op in film.ops if op.phase == "forward"]
    backward = [op.layer for op in film.ops if op.phase == "backward"]
    places = list(dict.fromkeys(forward))
    last_seen = [places.index(layer) for layer in dict.fromkeys(backward) if layer in places]
    assert last_seen == sorted(last_seen, reverse=True), "backward runs through the layers in the opposite order"
    for op in film.ops:
        if op.collective and op.phase != UPDATE:
            other = film.op(op.conjugate or 0)
            assert (other.layer, other.phase != op.phase) == (op.layer, True)
    assert find(film, "blocks.0.attention.heads", "backward", True).equation.startswith("dk_g")


def test_memory_grows_as_it_should() -> None:
    film = film_of("llama", 3).ops
    ops, update = [op for op in film if op.phase != UPDATE], [op for op in film if op.phase == UPDATE]
    kept = [op.memory[0].activations for op in ops]
    grads = [op.memory[0].grads for op in ops]
    turn = next(i for i, op in enumerate(ops) if op.phase == "backward")
    assert kept[:turn] == sorted(kept[:turn]) and len(set(kept[turn:])) == 1, "kept until backward is over"
    assert set(grads[:turn]) == {0} and grads[turn:] == sorted(grads[turn:])
    assert grads[-1] == ops[-1].memory[0].params
    assert {op.memory[0].activations for op in update} == {0}, "nothing is kept when backward is over"
    moments = [op.memory[0].moments for op in update]
    assert moments == sorted(moments) and moments[-1] == 2 * update[-1].memory[0].params
    assert update[-1].memory[0].grads == 0


def test_sharded_dims_are_told() -> None:
    film = film_of("llama", 3)
    assert [(a.name, a.placement, a.along) for a in find(film, "blocks.0.mlp.down", "forward").arrays] == [
        ("x", SHARDED, "FFN columns"), ("W", SHARDED, "FFN columns"), ("y_partial", PARTIAL, ""),
    ]  # fmt: skip
    assert find(film, "blocks.0.attention.qkv", "forward").made.shape_text == "[4, 8|6|6]"


def test_block_of_a_model_directory(tmp_path: Path) -> None:
    raw = {**PRESETS["llama"], "num_hidden_layers": 3}
    model = new_model(config_from_hf(raw), make_site(SerialGroup()), seed=5)
    save_model(model, tmp_path / "model", SerialGroup(), Documents(raw))
    film = make_film(Wish(ranks=2, model=str(tmp_path / "model"), block=2))
    op = find(film, "blocks.2.attention.out", "forward")
    joined = np.concatenate([values(named(op, "W"), rank) for rank in range(2)], axis=1)
    np.testing.assert_allclose(joined, model.blocks[2].attention.out.product.weight.data, rtol=1e-3, atol=1e-3)
    assert "block 2 of" in film.title
    with pytest.raises(UsageError, match="blocks 0 to 2"):
        make_film(Wish(model=str(tmp_path / "model"), block=3))


def test_fields_and_mistakes(tmp_path: Path) -> None:
    film = make_film(Wish(ranks=2, overrides=("num_hidden_layers=2", "num_attention_heads=6")))
    assert any(op.layer == "blocks.1.mlp.down" for op in film.ops)
    assert "6 heads of 2 dealt 3+3" in film.facts[0]
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["gpt2"]))
    assert make_film(Wish(ranks=1, config=str(tmp_path))).ops
    for wish, said in [
        (Wish(ranks=0), "at least 1"),
        (Wish(overrides=("x",)), "KEY=VALUE"),
        (Wish(tokens=0), "at least 1"),
        (Wish(text="hello"), "tokenizer"),
        (Wish(config="run.toml"), "takes a config.json"),
    ]:
        with pytest.raises(UsageError, match=said):
            make_film(wish)
    with pytest.raises(ConfigError, match="positions"):
        make_film(Wish(tokens=100))
    with pytest.raises(ConfigError, match="unknown key"):
        make_film(Wish(overrides=("frobnicate=1",)))
