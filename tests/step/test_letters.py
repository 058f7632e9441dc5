"""The letters beside arrays (I, R, V, P) are true of the numbers shown, of layers of one's own too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from examples.your_own_layer import make_model
from mpitp.comm import Group, run_threads
from mpitp.layers import Layer, Site
from mpitp.layers.array_type import ArrayType
from mpitp.models import Batch, CausalLM
from mpitp.step.assemble import assemble
from mpitp.step.film import LETTERS, Array, Film, Op
from mpitp.step.frame import algebra_of
from mpitp.step.page import page_of
from mpitp.step.record import record_pass
from mpitp.step.screen import list_lines, whole_op
from tests.step.films import film_of
from tests.step.test_record import LAYOUTS, find, named, values

CLOSE = {"rtol": 2e-3, "atol": 2e-3}  # four digits are kept of what is shown
FUSED = ("qkv", "gate_up", "W_gu")  # parts one after the other, each cut by itself


def shown(film: Film) -> Iterator[tuple[Op, Array]]:
    for op in film.ops:
        yield from ((op, array) for array in op.arrays)


def check_equal_and_summands(film: Film) -> set[str]:
    """I and R are equal on all ranks; what is handed to a sum is P, and its sum is what the collective makes."""
    seen = set()
    for op, array in shown(film):
        seen.add(array.letter)
        if array.letter in "IR":
            assert all(picture == array.pictures[0] for picture in array.pictures), (op.layer, op.phase, array.name)
        if array.letter == "P":
            later = film.ops[op.number - 1 :]
            total = next(each for each in later if each.collective and each.arrays[0].name == array.name)
            assert total.layer == op.layer and total.arrays[0].letter == "P"
            parts = np.stack([values(array, rank) for rank in range(film.ranks)])
            expected = parts.max(axis=0) if total.collective == "all_reduce max" else parts.sum(axis=0)
            np.testing.assert_allclose(values(total.made, 0), expected, **CLOSE)
    return seen


def put_together(array: Array, whole: np.ndarray) -> np.ndarray | None:
    """The ranks' pieces beside each other, along the dim in which they make up the whole; None: along none."""
    pieces = [values(array, rank) for rank in range(len(array.pictures))]
    for dim in reversed(range(whole.ndim)):
        if sum(piece.shape[dim] for piece in pieces) == whole.shape[dim]:
            return np.concatenate(pieces, axis=dim)
    return None


@pytest.mark.parametrize(("preset", "ranks"), LAYOUTS)
def test_letters_are_true(preset: str, ranks: int) -> None:
    film, whole = film_of(preset, ranks), film_of(preset, 1)
    assert check_equal_and_summands(film) == set("IRVP")
    joined = set()
    for op, array in shown(film):
        is_fused = (
            op.layer.removesuffix(".weight").removesuffix(".bias").endswith(FUSED)
            or array.name.removeprefix("d") in FUSED
        )
        place = (op.layer, op.phase, op.equation)
        same = [each for each in whole.ops if (each.layer, each.phase, each.equation) == place]
        if array.letter == "V" and not is_fused and same:  # one rank sums no KV heads
            one = values(named(same[0], array.name), 0)
            np.testing.assert_allclose(put_together(array, one), one, **CLOSE)
            joined.add((op.layer, array.name))
    down = ("blocks.0.mlp.experts", "W_d") if preset == "mixtral" else ("blocks.0.mlp.down", "W")
    assert {("blocks.0.attention.out", "x"), down, ("head", "y"), ("embedding", "dE")} <= joined


KNOWN = {
    ("embedding", "forward"): "ids I, E V, y_partial P",
    ("blocks.0.norm1", "forward"): "x I, W I, y I",
    ("blocks.0.norm1", "backward"): "dy I, x I, dx I, dW I",
    ("blocks.0.attention.qkv", "forward"): "x R, W V, y V",
    ("blocks.0.attention.qkv", "backward"): "dy V, W V, dx_partial P",
    ("blocks.0.attention.heads", "forward"): "qkv V, scores V, mask I, softmax V, o V",
    ("blocks.0.attention.heads", "backward"): "do V, dkv_partial P",
    ("blocks.0.attention.out", "forward"): "x V, W V, y_partial P",
    ("blocks.0.attention.out", "backward"): "dy R, W V, x V, dx V, dW V",
    ("blocks.0.residual1", "forward"): "x I, branch I, y I",
    ("blocks.0.mlp.activation", "backward"): "da V, dgate_up V",
    ("blocks.0.input", "backward"): "dy I, dbranch I, dx I",
    ("head", "forward"): "x R, W V, y V",
    ("loss", "forward"): "logits V, m_partial P",
    ("loss", "backward"): "dloss R, dlogits V",
    ("embedding", "backward"): "dy R, dE V",
    ("update.norm", "update"): "squares_partial P",
    ("update.clip", "update"): "squares I, norm I, c I",
    ("update.blocks.0.mlp.down.weight", "update"): "W V, g V, m V, v V, W_new V",
    ("update.final_norm.weight", "update"): "W I, g I, m I, v I, W_new I",
}
SUMS = {
    ("embedding", "forward"): "y_partial P, y I",
    ("blocks.0.attention.heads", "backward"): "dkv_partial P, dkv I",
    ("blocks.0.attention.qkv", "backward"): "dx_partial P, dx I",
    ("blocks.0.attention.out", "forward"): "y_partial P, y I",
    ("loss", "forward"): "m_partial P, m I",
}
GPT2 = {
    ("positions", "forward"): "x I, P I, y I",
    ("positions", "backward"): "dy I, dx I, dP I",
    ("blocks.0.mlp.up", "forward"): "x R, W V, b V, y V",
    ("blocks.0.mlp.down", "backward"): "dy R, W V, x V, dx V, dW V, db I",
}


def told(op: Op) -> str:
    return ", ".join(f"{array.name} {array.letter}" for array in op.arrays)


def test_known_letters() -> None:
    llama, gpt2 = film_of("llama", 3), film_of("gpt2", 3)
    assert {place: told(find(llama, *place)) for place in KNOWN} == KNOWN
    assert {place: told(find(llama, *place, True)) for place in SUMS} == SUMS
    assert {place: told(find(gpt2, *place)) for place in GPT2} == GPT2


def test_letters_are_seen_and_explained() -> None:
    film = film_of()
    text = "\n".join(whole_op(film, find(film, "blocks.0.mlp.down", "forward")))
    assert "V varying: cut by FFN columns" in text and "P partial: to be summed over the ranks" in text
    page = page_of(film)
    for letter, (placement, _, meaning) in LETTERS.items():
        assert f'"letter":"{letter}"' in page and meaning in page
        assert any(array.placement == placement for _, array in shown(film))


class Halves(Layer):
    """y = x, the long way: each rank adds its share."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def forward(self, x: Any, run: Any = None) -> tuple[Any, Any]:
        return self.group.all_reduce(x / self.group.size), None

    def backward(self, dy: Any, ctx: Any) -> Any:
        return dy + 0

    def children(self) -> dict[str, Any]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        return incoming


class Undocumented(Halves):
    __doc__ = None


def own_model(site: Site) -> CausalLM:
    model = make_model(site)
    *others, norm, head = model.layers.items()
    model.layers = dict([*others, ("halves", Halves(site.tp)), norm, head])
    return model


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_layer_of_ones_own_is_told_by_its_class(ranks: int) -> None:
    """Its docstring's first line, its collectives, and its own work before and after the layers that it is made of."""
    tokens = np.arange(8).reshape(2, 4) % 5
    batch = Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:])
    film = assemble("own", [], run_threads(ranks, record_pass, own_model, batch))
    check_equal_and_summands(film)
    places = [(op.layer, op.collective) for op in film.ops if op.layer.startswith(("bottleneck", "halves"))]
    forward = ["bottleneck.up", "bottleneck", "bottleneck.down", "bottleneck.down", "bottleneck", "halves", "halves"]
    assert [layer for layer, _ in places[:7]] == forward
    assert [collective for layer, collective in places if layer == "halves"] == ["all_reduce sum", "", ""]
    op = find(film, "halves", "forward")
    assert (op.title, op.equation) == ("Halves", "y = x, the long way: each rank adds its share.")
    assert told(find(film, "halves", "forward", True)) == "given P, made I"
    between, after = (op for op in film.ops if (op.layer, op.phase) == ("bottleneck", "forward"))
    assert (told(between), told(after)) == ("y V, gate I, y V", "y I, gate I, y I")
    assert between.title == "GatedBottleneck" and between.equation.startswith("Column-parallel, relu squared")
    inner, act = values(between.arrays[0], 0), values(between.made, 0)
    np.testing.assert_allclose(act, np.maximum(inner, 0) ** 2, **CLOSE)
    assert "halves" in "\n".join(list_lines(film))


def test_a_layer_without_a_docstring() -> None:
    layer = Undocumented(run_threads(1, lambda group: group)[0])
    assert algebra_of(layer).forward[0].equation == "Undocumented"  # type: ignore[union-attr]
