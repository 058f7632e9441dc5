"""Films of encoders, vision transformers, and models with an encoder and a decoder are true."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.step.code import code_of
from mpitp.step.film import PARTIAL, REPLICATED, UPDATE, Film
from mpitp.step.mesh_pass import Layout
from mpitp.step.others import OTHER_PRESETS
from mpitp.step.page import page_of
from mpitp.step.source import make_film
from mpitp.step.tour import guide
from mpitp.step.wish import Wish
from tests.parity.encoder_decoder_case import PAIRS
from tests.step.browser import needs_chromium, walk_page
from tests.step.films import film_of
from tests.step.test_mesh import neighbours
from tests.step.test_record import find, named, values

CLOSE = {"rtol": 5e-3, "atol": 5e-3}
PARITY = PAIRS.parent
CASES = [(preset, ranks) for preset in OTHER_PRESETS for ranks in (2, 3)]


@pytest.mark.parametrize(("preset", "ranks"), CASES)
def test_numbers_are_those_of_one_rank(preset: str, ranks: int) -> None:
    whole, film = film_of(preset, 1), film_of(preset, ranks)
    for op in (op for op in film.ops if op.phase != UPDATE):
        for array in op.arrays:
            if array.placement == REPLICATED:
                assert all(picture == array.pictures[0] for picture in array.pictures), (op.layer, array.name)
        if op.collective.startswith("all_reduce sum"):
            given, made = op.arrays
            total = np.sum([values(given, rank) for rank in range(ranks)], axis=0)
            assert (given.placement, made.placement) == (PARTIAL, REPLICATED)
            np.testing.assert_allclose(values(made, 0), total, rtol=2e-3, atol=2e-3)
        if op.collective:
            other = film.op(op.conjugate or 0)
            assert (other.layer, other.phase != op.phase) == (op.layer, True)
        if op.made.placement == REPLICATED and op.made.role == "out":
            same = find(whole, op.layer, op.phase, bool(op.collective)).made
            if same.name == op.made.name:
                np.testing.assert_allclose(values(op.made, 0), values(same, 0), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("preset", OTHER_PRESETS)
def test_what_is_told_of_an_operation_holds(preset: str) -> None:
    """Residual sums (behind which norms stand in some), and sentences and code for every operation."""
    film, cut = film_of(preset), make_film(Wish(preset=preset, ranks=2, layout=Layout(sequence_parallel=True)))
    sums = [op for op in film.ops if op.subject == "residual connection"]
    assert len(sums) == {"bert": 4, "vit": 4, "t5": 10, "bart": 10}[preset]
    for op in sums:
        past, branch, made = (values(array, 1) for array in op.arrays)
        np.testing.assert_allclose(made, past + branch, **CLOSE)
    for op in (*film.ops, *cut.ops):
        assert "A layer of its own" not in guide(op).why, (op.subject, op.phase)
        assert code_of(op.code).startswith(("def ", "@")), op.code


def columns(film: Film, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What is shown of cross attention on a rank: its softmax [a, t, t_source], and v [t_source, a, 2]."""
    op = find(film, "blocks.0.cross.heads", "forward")
    softmax, kv = values(named(op, "softmax"), rank), values(named(op, "kv"), rank)
    return softmax, kv.reshape(len(kv), 2, len(softmax), 2)[:, 1]


@pytest.mark.parametrize("preset", ["t5", "bart"])
def test_cross_attention_is_shown_by_head_and_its_gradient_reaches_the_encoder(preset: str) -> None:
    film = film_of(preset)
    for rank in range(3):
        softmax, v = columns(film, rank)
        assert softmax.shape[1:] == (3, 4), "queries of the target, keys of the source"
        o = np.concatenate([softmax[head] @ v[:, head] for head in range(len(softmax))], axis=1)
        np.testing.assert_allclose(values(find(film, "blocks.0.cross.heads", "forward").made, rank), o, **CLOSE)
    summed = find(film, "blocks.0.cross.kv", "backward", collective=True)
    memory = find(film, "to decoder", "backward")
    assert film.op(summed.conjugate or 0).layer == "blocks.0.cross.kv" and summed.number < memory.number
    np.testing.assert_array_equal(values(summed.made, 0), values(memory.made, 0))
    assert find(film, "to decoder", "forward").made.name == "ids"


@pytest.mark.parametrize(
    "directory",
    ["golden_encoders/roberta-classification", "golden_vision/dinov2-other-size", "golden_encoder_decoders/t5"],
)
def test_one_block_of_a_directory(directory: str) -> None:
    film = make_film(Wish(model=str(PARITY / directory), block=1, ranks=2))
    layers = {op.layer for op in film.ops if op.phase != UPDATE}
    assert "blocks.1.attention.qkv" in layers and not any("blocks.0" in layer for layer in layers)
    assert film.title.startswith("block 1 of ")


def test_replicas_and_invariant_mode() -> None:
    film = make_film(Wish(preset="t5", ranks=2, layout=Layout(dp=2)))
    assert any(op.axis == "dp" and op.collective for op in film.ops)
    film = make_film(Wish(preset="bert", ranks=2, invariant=True))
    assert {op.collective for op in film.ops if op.layer == "blocks.0.attention.out"} == {"", "all_reduce_in_order sum"}


LAYOUTS: dict[str, tuple[str, int, Layout]] = {
    "bert pp": ("bert", 2, Layout(pp=2)),
    "bert zb x tp, sp": ("bert", 4, Layout(pp=2, schedule="zb", sequence_parallel=True)),
    "bert ring": ("bert", 3, Layout(cp=3)),
    "vit pp": ("vit", 2, Layout(pp=2, schedule="gpipe")),
    "vit heads": ("vit", 4, Layout(cp=2, cp_form="heads")),
    "t5 pp": ("t5", 4, Layout(pp=4)),
    "t5 interleaved": ("t5", 2, Layout(pp=2, schedule="interleaved")),
    "t5 ring": ("t5", 4, Layout(cp=2)),
    "bart pp x cp": ("bart", 4, Layout(pp=2, cp=2)),
}


@cache
def film_on(name: str) -> Film:
    preset, ranks, layout = LAYOUTS[name]
    return make_film(Wish(preset=preset, ranks=ranks, layout=layout))


@pytest.mark.parametrize("name", LAYOUTS)
def test_letters_and_messages_of_meshes_are_true(name: str) -> None:
    film = film_on(name)
    for op in film.ops:
        for array, (axis, letter) in ((shown, each) for shown in op.arrays for each in shown.letters):
            for group in neighbours(film, op, axis) if letter in "IR" else ():
                same = [array.pictures[place] for place in group]
                assert all(picture == same[0] for picture in same), (op.number, op.layer, array.name, axis)
        assert "A layer of its own" not in guide(op).why, (op.subject, op.phase)
        if op.collective == "send":
            other = film.op(op.other_end or 0)
            for place, peer in enumerate(op.peers):
                got = values(other.made, other.ranks.index(peer))
                np.testing.assert_array_equal(got, values(op.made, place))


def test_the_memory_goes_beside_the_activation_and_tables_are_summed() -> None:
    """Of four stages the first has the encoder, the last the head alone: the memory goes on from the second one."""
    film = film_on("t5 pp")
    sent = [(op.made.name, op.layer, op.phase) for op in film.ops if op.collective == "send"]
    assert {layer for name, layer, _ in sent if name == "m"} == {"stages 1-2", "stages 2-3"}
    assert {layer for name, layer, _ in sent if name == "dm"} == {"stages 1-2", "stages 2-3"}
    assert {layer for name, layer, _ in sent if name == "dB"} == {"stages 1-2"}
    assert {name for name, _, phase in sent if phase == "backward"} == {"dx", "dm", "dE", "dB"}
    whole = find(film, "to decoder", "forward")
    memory = next(op for op in film.ops if op.made.name == "m" and op.collective == "recv" and op.microbatch == 0)
    np.testing.assert_array_equal(values(memory.made, 0), values(named(whole, "x"), 0))


def test_keys_of_the_source_are_gathered_and_their_gradients_scattered() -> None:
    film = film_on("t5 ring")
    forward = find(film, "blocks.0.cross", "forward", collective=True)
    backward = find(film, "blocks.0.cross", "backward", collective=True)
    assert forward.collective.startswith("all_gather") and (forward.axis, forward.made.name) == ("cp", "kv")
    assert backward.collective.startswith("reduce_scatter") and (backward.axis, backward.made.name) == ("cp", "dkv")
    assert (forward.conjugate, backward.conjugate) == (backward.number, forward.number)
    total = np.sum([values(backward.arrays[0], rank) for rank in (0, 2)], axis=0)  # of cp, where tp is 0
    parts = np.concatenate([values(backward.made, rank) for rank in (0, 2)])
    np.testing.assert_allclose(parts, total, **CLOSE)


def test_blocks_of_a_directory_on_stages() -> None:
    film = make_film(Wish(model=str(PARITY / "golden_encoder_decoders/t5"), block=1, ranks=2, layout=Layout(pp=2)))
    layers = {op.layer for op in film.ops if op.phase != UPDATE}
    assert "encoder.blocks.1.attention.qkv" in layers and "blocks.1.cross.kv" in layers
    assert not any(".0." in layer for layer in layers) and film.title.startswith("block 1 of ")
    film = make_film(Wish(model=str(PARITY / "golden_vision/vit"), ranks=2, layout=Layout(pp=2)))
    assert film.title.startswith("blocks 0-1 of ")


@needs_chromium
def test_the_page_is_clean(tmp_path: Path) -> None:
    found = walk_page(tmp_path, page_of(film_of("t5")), 1366, 768)
    assert found["errors"] == found["faults"] == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--preset", "t5", "--pp", "2", "--set", "num_layers=0"], 3, "num_layers"),
        (["--preset", "bert", "--cp", "3", "--tokens", "5"], 2, "5 tokens can't be cut over --cp 3: it takes 6"),
        (["--preset", "vit", "--cp", "3"], 2, "it takes 6 at least; an image has more with a larger --set image_size"),
        (["--model", str(PAIRS / "t5"), "--block", "1", "--pp", "4"], 2, "4 parts of a pipeline take 2 blocks"),
        (["--preset", "vit", "--tokens", "3"], 2, "an image has as many as the model's patches"),
        (["--preset", "bert", "--text", "a"], 2, "--text needs the tokenizer of a model"),
        (["--preset", "bart", "--tokens", "65"], 3, "65 tokens exceed the model's 64 positions"),
        (["--preset", "bert", "--set", "hiden_size=8"], 3, "did you mean 'hidden_size'"),
        (["--model", str(PAIRS / "t5"), "--block", "2"], 2, "encoder and decoder both have the blocks 0 to 1"),
        (["--model", str(PARITY / "golden_vision/vit"), "--text", "a"], 2, "this one looks at images"),
    ],
)
def test_what_can_not_be_shown_is_refused(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["step", *words, "--list"]) == code
    assert said in capsys.readouterr().err
