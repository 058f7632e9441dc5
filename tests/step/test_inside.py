"""What is shown inside operations is true: factors of products, scores and softmax of attention, norm and update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitp.layers.partition import share_heads
from mpitp.ops.adamw import AdamWRule, adamw_reference
from mpitp.optim.adamw import AdamWSettings
from mpitp.step.code import code_of
from mpitp.step.film import UPDATE, Film
from mpitp.step.guide import EXAMPLES
from mpitp.step.mesh_pass import Layout
from mpitp.step.products import products_of
from mpitp.step.source import PRESETS, Wish, make_film
from mpitp.step.tour import guide
from mpitp.step.update import CLIP_NORM, LR
from tests.step.films import film_of
from tests.step.test_record import LAYOUTS, find, named, values

CLOSE = {"rtol": 5e-3, "atol": 5e-3}  # four digits are kept of what is shown


def owned_columns(film: Film, rank: int) -> np.ndarray:
    """1 for the columns of [q | k | v] whose heads a rank owns: a KV head on several ranks counts once in dx."""
    units = film.sizes["units"]
    heads = share_heads(units["heads"], units["KV heads"], rank, film.ranks)
    kv = [float(head in heads.kv_owned) for head in heads.kv]
    return np.repeat([1.0] * heads.query.size + kv + kv, film.sizes["head_dim"])


@pytest.mark.parametrize(("preset", "ranks"), LAYOUTS)
def test_products_are_those_of_their_rows_and_columns(preset: str, ranks: int) -> None:
    """What the page lights up for out[i, j] is what it was made of."""
    film, seen = film_of(preset, ranks), 0
    for op in film.ops:
        for product in products_of(op.equation, [array.name for array in op.arrays]):
            bias = any(array.name == "b" for array in op.arrays)
            for rank in range(ranks):
                left, right = values(named(op, product.left), rank), values(named(op, product.right), rank)
                if op.layer.endswith("qkv") and product.out == "dx_partial":
                    left = left * owned_columns(film, rank)
                left, right = left.T if product.is_left_turned else left, right.T if product.is_right_turned else right
                made = left @ right + (values(named(op, "b"), rank) if bias else 0)
                np.testing.assert_allclose(values(named(op, product.out), rank), made, **CLOSE)
                seen += 1
    assert seen >= (9 if preset == "mixtral" else 14) * ranks  # experts multiply rows of their own


def test_products_are_read_off_equations() -> None:
    (first, second) = products_of("dx_r = dy W_r, dW_r = dy^T x_r, db = sum_t dy", ["dy", "W", "x", "dx", "dW", "db"])
    assert (first.out, first.left, first.right, first.is_left_turned) == ("dx", "dy", "W", False)
    assert (second.out, second.left, second.right, second.is_left_turned) == ("dW", "dy", "x", True)
    assert products_of("y = x W^T", ["x", "y"]) == [] == products_of("y = x + branch", ["x", "y", "branch"])


@pytest.mark.parametrize("preset", PRESETS)
def test_attention_is_shown_by_head(preset: str) -> None:
    film = film_of(preset, 3)
    op = find(film, "blocks.0.attention.heads", "forward")
    kv_heads = film.sizes["units"]["KV heads"]
    group, d = film.sizes["units"]["heads"] // kv_heads, film.sizes["head_dim"]
    first = 0
    for rank in range(3):
        scores, softmax, mask = (values(named(op, name), rank) for name in ("scores", "softmax", "mask"))
        np.testing.assert_array_equal(mask, np.tril(np.ones(mask.shape)))
        hidden = np.where(mask == 1, scores, -np.inf)
        p = np.exp(hidden - hidden.max(axis=2, keepdims=True))
        np.testing.assert_allclose(softmax, p / p.sum(axis=2, keepdims=True), **CLOSE)
        qkv, heads = values(named(op, "qkv"), rank), len(scores)
        held = (qkv.shape[1] // d - heads) // 2
        v = qkv[:, (heads + held) * d :].reshape(len(qkv), held, d)
        kv = [(first + head) // group - first // group for head in range(heads)]
        o = np.concatenate([softmax[head] @ v[:, kv[head]] for head in range(heads)], axis=1)
        np.testing.assert_allclose(values(op.made, rank), o, **CLOSE)
        first += heads


@pytest.mark.parametrize("preset", PRESETS)
def test_norm_clipping_and_update(preset: str) -> None:
    """The norm is that of the one-rank gradient; each update follows from what is shown beside it."""
    whole, film = film_of(preset, 1), film_of(preset, 3)
    norms = [values(named(find(each, "update.clip", UPDATE), "norm"), 0)[0] for each in (whole, film)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-3)
    updates = [op for op in film.ops if op.subject == "AdamW"]
    scale = values(named(find(film, "update.clip", UPDATE), "c"), 0)[0]
    assert scale == pytest.approx(min(1.0, CLIP_NORM / norms[1]), rel=1e-3)
    for op in (op for op in updates if named(op, "W").pictures[0].is_whole):
        w, g, m, v, new = (values(named(op, name), 0) for name in ("W", "g", "m", "v", "W_new"))
        settings = AdamWSettings()
        decay = 0.0 if "without decay" in op.note else settings.weight_decay
        rule = AdamWRule(LR, *settings.betas, settings.eps, decay, 1)
        expected = adamw_reference(w, scale * g, np.zeros_like(w), np.zeros_like(w), rule)
        for shown, right in zip((new, m, v), expected, strict=True):
            np.testing.assert_allclose(shown, right, rtol=5e-3, atol=2e-3)


def test_norm_weights_on_token_shards_are_summed_before_the_norm() -> None:
    film = make_film(Wish(ranks=3, layout=Layout(sequence_parallel=True)))
    op = next(op for op in film.ops if op.layer == "gradients")
    total = sum(values(op.arrays[0], rank) for rank in range(3))
    np.testing.assert_allclose(values(op.made, 1), total, **CLOSE)
    norm = [values(named(find(each, "update.clip", UPDATE), "norm"), 0)[0] for each in (film, film_of())]
    np.testing.assert_allclose(norm[0], norm[1], rtol=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_operation_says_why_and_shows_its_code(preset: str) -> None:
    layouts = Layout(sequence_parallel=True), Layout(pp=2), Layout(cp=2), Layout(cp=2, cp_form="heads")
    films = [film_of(preset), *(make_film(Wish(preset=preset, ranks=2, layout=layout)) for layout in layouts)]
    for op in (op for film in films for op in film.ops):
        told = guide(op)
        assert told.chapter in EXAMPLES and told.why.endswith(".") and told.without.endswith(".")
        assert "A layer of its own" not in told.why, (op.subject, op.phase)
        assert code_of(op.code).startswith(("def ", "@")), op.code


def test_chapters_lead_to_examples_that_are_there() -> None:
    folder = Path(__file__).resolve().parents[2] / "examples"
    assert [name for names in EXAMPLES.values() for name in names if not (folder / name).is_file()] == []


def test_code_that_is_not_at_hand() -> None:
    assert code_of("nowhere:Nothing.forward") == code_of("mpitp:missing") == ""


def test_words_stand_for_the_tiny_models_ids() -> None:
    film = film_of()
    assert {int(id) for id in values(film.ops[0].arrays[0], 0)} <= set(film.words)
    assert make_film(Wish(ranks=1, overrides=("vocab_size=12",))).words == {}
