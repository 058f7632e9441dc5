"""`mpitp step` on meshes of several axes: true letters, messages that arrive, sums over replicas, an order."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.step.assemble import assemble
from mpitp.step.film import Film, Memory, Message, Op, RankOp, Telling
from mpitp.step.mesh_pass import Layout
from mpitp.step.page import page_of
from mpitp.step.rows import row_lines
from mpitp.step.source import Wish, make_film
from mpitp.step.walk import Walk
from tests.step.browser import browse, needs_chromium, walk_page
from tests.step.test_letters import CLOSE
from tests.step.test_record import values

LAYOUTS: dict[str, tuple[str, int, Layout]] = {
    "pp": ("llama", 2, Layout(pp=2)),
    "dp tied": ("qwen2", 2, Layout(dp=2)),
    "ring": ("gpt2", 3, Layout(cp=3)),
    "heads x tp": ("llama", 4, Layout(cp=2, cp_form="heads")),
    "pp tied x tp, sp": ("qwen2", 4, Layout(pp=2, sequence_parallel=True)),
    "ZeRO-1 x tp": ("gpt2", 4, Layout(dp=2, zero=1)),
    "ZeRO-2 x pp": ("llama", 4, Layout(pp=2, dp=2, zero=2)),
    "ZeRO-3 tied x tp": ("qwen2", 4, Layout(dp=2, microbatches=2, zero=3)),
    "ZeRO-3 x pp": ("llama", 4, Layout(pp=2, dp=2, zero=3)),
    "uneven": ("llama", 12, Layout(pp=2, dp=2)),
    "all": ("gpt2", 16, Layout(pp=2, dp=2, cp=2, schedule="gpipe", microbatches=3)),
}


@cache
def film_on(name: str) -> Film:
    preset, ranks, layout = LAYOUTS[name]
    return make_film(Wish(preset=preset, ranks=ranks, layout=layout))


def coordinates(film: Film, rank: int) -> dict[str, str]:
    return dict(place.split(" ") for place in film.places[rank].split(", "))


def neighbours(film: Film, op: Op, axis: str) -> list[list[int]]:
    """The places in `op.ranks` of those that differ along `axis` only."""
    groups: dict[str, list[int]] = {}
    for place, rank in enumerate(op.ranks):
        others = str(coordinates(film, rank) | {axis: ""})
        groups.setdefault(others, []).append(place)
    return list(groups.values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_letters_are_true_along_every_axis(name: str) -> None:
    film, seen = film_on(name), set()
    for op in film.ops:
        for array in op.arrays:
            for axis, letter in array.letters:
                seen.add((axis, letter))
                for group in neighbours(film, op, axis) if letter in "IR" else ():
                    first = array.pictures[group[0]]
                    assert all(array.pictures[place] == first for place in group), (op.number, op.layer, array.name)
    layout = LAYOUTS[name][2]
    assert seen >= {(axis, "V") for axis in ("dp", "cp") if getattr(layout, axis) > 1}
    assert ("pp", "V") not in seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_received_is_what_was_sent(name: str) -> None:
    film = film_on(name)
    sends = [op for op in film.ops if op.collective == "send"]
    receives = [op for op in film.ops if op.collective == "recv"]
    assert {op.other_end for op in sends} == {op.number for op in receives}
    for op in sends:
        assert op.other_end is not None
        other = film.op(op.other_end)
        assert other.other_end == op.number > 0 and op.number < other.number and op.column < other.column
        assert (op.phase, op.microbatch) == (other.phase, other.microbatch)
        for place, peer in enumerate(op.peers):
            assert other.peers[other.ranks.index(peer)] == op.ranks[place]
            got = values(other.made, other.ranks.index(peer))
            np.testing.assert_array_equal(got, values(op.made, place))


@pytest.mark.parametrize("name", ["dp tied", "ring", "heads x tp", "uneven", "all"])
def test_gradients_are_summed_over_replicas(name: str) -> None:
    film = film_on(name)
    sums = [op for op in film.ops if op.layer == "gradients"]
    assert sums and all(op.phase == "backward" for op in sums)
    for op in sums:
        given, made = op.arrays
        for group in op.groups:
            places = [op.ranks.index(rank) for rank in group]
            total = np.sum([values(given, place) for place in places if given.pictures[place].is_whole], axis=0)
            for place in places if given.pictures[places[0]].is_whole else ():
                np.testing.assert_allclose(values(made, place), total, **CLOSE)


def test_a_microbatch_goes_through_the_stages_in_order() -> None:
    film = film_on("pp")
    forward = [op for op in film.ops if op.phase == "forward" and op.microbatch == 1]
    assert [op.ranks for op in forward] == sorted(op.ranks for op in forward)
    assert forward[0].layer == "embedding" and forward[-1].layer == "loss"
    assert [(op.title, op.ranks) for op in forward if op.peers] == [("send of x", [0]), ("recv of x", [1])]
    send = next(op for op in forward if op.collective == "send")
    assert send.conjugate is not None
    back = film.op(send.conjugate)
    assert (back.title, back.phase, back.ranks, back.microbatch) == ("recv of dx", "backward", [0], 1)
    for number in (0, 1):  # what a rank does never overlaps
        columns = [op.column for op in film.ops if number in op.ranks]
        assert columns == sorted(set(columns))


def test_rows_and_messages_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--pp", "2", "--dp", "2", "--rows"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 (pp 1, dp 1)" in out and "0 > 2, 1 > 3" in out and "D" in out
    film = film_on("pp")
    lines = row_lines(film, 200, now=1)
    rows = [line for line in lines if line.startswith("rank ")]
    assert rows[0].startswith("rank 0 (pp 0) fff") and rows[1].startswith("rank 1 (pp 1)  ")
    sent = next(op for op in film.ops if op.collective == "send")
    assert rows[0][len("rank 0 (pp 0) ") + sent.column - 1] == ">"
    walk = Walk(film)
    walk.press("m")
    assert any("microbatch 0, stages 0-1 (pp), 0 > 1" in line for line in walk.page or [])
    walk.press("x")
    walk.press("x")
    text = "\n".join(walk.lines(80, 24))
    assert "SEND over pp" in text and "of microbatch 0" in text and "its receive is op" in text


def test_what_cannot_be_laid_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, told in [
        (["--zero", "1"], "give --dp, --ep or --cp too"),
        (["--pp", "0"], "--pp must be at least 1"),
        (["--pp", "2", "--microbatches", "1"], "2 stages take as many at least"),
        (["--cp", "2", "--tokens", "3"], "it takes 4 at least"),
        (["-n", "3", "--dp", "2"], "the job has 3"),
        (["--pp", "2", "--set", "num_hidden_layers=1"], "2 stages"),
    ]:
        assert main(["step", *words, "--list"]) in (2, 3)
        assert told in capsys.readouterr().err, words


def message_op(op: str, message: Message) -> RankOp:
    return RankOp(Telling("here", "forward", op, "", "", "", op), [], Memory(0, 0, 0), 0.0, 0, "pp", 0, message)


def test_a_receive_without_its_send_is_a_fault() -> None:
    one, other = Message(0, 1, "a"), Message(0, 1, "b")
    places = [{"pp": 0}, {"pp": 1}]
    film = assemble("", [], [[message_op("send", one)], [message_op("recv", one)]], places)
    assert [op.column for op in film.ops] == [1, 2]
    with pytest.raises(AssertionError, match="without its send"):
        assemble("", [], [[message_op("send", one)], [message_op("recv", other)]], places)


ACTIONS = """
<script>
const svg = document.querySelector("#timeline svg"), count = words => svg.querySelectorAll(words).length;
const result = {messages: count("path.message"), joined: count("path.joined"), errors,
  labels: [...svg.querySelectorAll("text")].map(node => node.textContent)};
show(film.ops.find(op => op.collective === "send").number);
result.marked = count("path.message.now");
result.about = document.getElementById("about").textContent;
document.querySelector("#about .other-end").click();
result.at = +document.body.dataset.op;
const told = Object.assign(document.createElement("pre"), {id: "result", textContent: JSON.stringify(result)});
document.body.replaceChildren(told);
</script>
"""


@needs_chromium
def test_page_of_a_mesh_in_a_browser(tmp_path: Path) -> None:
    film = make_film(Wish(ranks=4, layout=Layout(pp=2, dp=2)))
    found = browse(tmp_path, page_of(film), "1366,900", ACTIONS)
    assert found["errors"] == []
    sends = [op for op in film.ops if op.collective == "send"]
    assert found["messages"] == 2 * len(sends) and found["marked"] == 2 and found["joined"] > 0
    assert found["labels"] == [f"{rank}  ({place})" for rank, place in enumerate(film.places)]
    assert "of microbatch 0, over pp" in found["about"] and found["at"] == sends[0].other_end


@needs_chromium
def test_every_operation_of_a_mesh_is_clean_on_a_small_screen(tmp_path: Path) -> None:
    film = make_film(Wish(preset="gpt2", ranks=4, layout=Layout(cp=2)))
    found = walk_page(tmp_path, page_of(film), 1024, 768)
    assert found["errors"] == found["faults"] == found["below"] == []
