"""What the page explains: cells that light up, messages step by step, other films, sliders, presenting, printing."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitp.layers.linear import RowParallelLinear
from mpitp.step.code import example_text
from mpitp.step.cuts import Sizes, cuts
from mpitp.step.page import page_of
from mpitp.step.sends import ALGORITHMS
from mpitp.step.source import Wish, make_films
from mpitp.step.tour import guide
from tests.step.browser import browse, chromium, needs_chromium
from tests.step.films import film_of

TELL = """
const told = Object.assign(document.createElement("pre"), {id: "result"});
told.textContent = JSON.stringify({...result, errors});
document.body.replaceChildren(told);
</script>
"""
PRESS = """
<script>
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const result = {};
const state = () => [film.ranks, film.invariant, +document.body.dataset.op, film.ops[now - 1].layer];
"""
LIGHTS = (
    PRESS
    + """
/* The lit cells [array, rank, i, j] when one is pointed at. */
const litWhen = (name, rank, i, j) => {
  const op = film.ops[now - 1], array = op.arrays.find(each => each.name === name);
  const rules = litBy(op, array, rank, i, j), lit = [];
  const look = (each, at, picture) => picture.values.forEach((row, k) => row.forEach((_, l) => {
    if (rules[each.name]?.(at, k, l)) lit.push([each.name, at, k, l]);
  }));
  for (const each of op.arrays) each.pictures.forEach((picture, at) => look(each, at, picture));
  return {lit, text: cellText(op, array, rank, i, j)};
};
show(6); result.product = litWhen("y_partial", 1, 2, 3);
show(7); result.sum = litWhen("y", 0, 1, 2);
show(34); result.grad = litWhen("dW", 0, 1, 2);
const canvas = document.querySelector("#arrays canvas"), box = canvas.getBoundingClientRect();
const before = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.join();
canvas.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + 5, clientY: box.top + 5, bubbles: true}));
result.tip = $("value").style.display;
result.changed = before !== canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.join();
canvas.dispatchEvent(new MouseEvent("mouseleave"));
result.back = before === canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.join();
"""
    + TELL
)
TOUR = (
    PRESS
    + """
show(7);
result.films = [...document.querySelectorAll("#films button")].map(node => node.textContent);
press("2"); result.two = state();
press("i"); result.invariant = state();
press("1"); press("i"); result.one = state();
press("3"); show(7); result.three = state();
const caption = () => document.querySelector("#arrays .sends .caption").textContent;
result.rounds = [caption()];
for (let k = 0; k < 4; k++) { press("s"); result.rounds.push(caption()); }
redraw(); result.rounds.push(caption());
document.querySelector('#arrays [data-way="tree"]').click(); press("s"); result.tree = caption();
result.conjugate = document.querySelector("#arrays .conjugate").textContent;
const names = node => node.map(set => [...set].sort().join(""));
result.ends = {};
for (const [kind, ways] of Object.entries(data.schedules[5])) for (const [way, rounds] of Object.entries(ways))
  result.ends[kind + " " + way] = after(kind, 5, rounds, rounds.length).slice(0, 5).map(names);
result.grid = [];
for (let ranks = 1; ranks <= 8; ranks++) for (const [heads, kv] of [[4, 2], [9, 3], [6, 1], [7, 7]])
  result.grid.push([ranks, heads, kv, cutsOf(sizesWith(heads, kv), ranks)]);
press("k"); result.sliders = [$("sliders").open, $("cut-table").children.length];
$("in-ranks").value = 5; $("in-ranks").dispatchEvent(new Event("input")); result.slid = $("cut-table").children.length;
$("sliders").close();
press("g"); result.gallery = [...document.querySelectorAll("#gallery h3")].map(node => node.textContent);
$("gallery-kind").value = "all_to_all"; $("gallery-kind").dispatchEvent(new Event("input"));
document.querySelectorAll("#gallery .sends").forEach(node => node.player.step()); $("gallery").close();
press("e"); result.code = $("code-text").textContent; result.examples = $("code-examples").textContent;
result.place = $("code-place").textContent;
result.numbers = [...document.querySelectorAll("#code-text .line")].map(node => +node.dataset.number);
[...document.querySelectorAll("#code-tabs button")][2].click();
result.second = [$("code-place").textContent, $("code-text").textContent, $("code-examples").textContent];

$("code").close();
$("chapter").value = "optimizer"; $("chapter").dispatchEvent(new Event("input")); result.chapter = state();
press("f"); result.scrollbar = getComputedStyle(document.documentElement).scrollbarWidth;
result.presents = [document.body.className, getComputedStyle($("timeline")).display]; press("f");
press("F5"); press("b"); press("PageDown"); result.darkened = [document.body.className, stops.size, state()[2]];
press("."); result.darkened.push(document.body.className); press("."); press("F5"); show(5);
const lowest = $("about").firstElementChild.getBoundingClientRect().bottom;
result.told = lowest <= document.querySelector("footer").getBoundingClientRect().top;
press("Escape"); result.darkened.push(document.body.className, document.querySelector("#about h2").textContent);
const frame = document.body.appendChild(document.createElement("iframe"));
window.open = () => frame.contentWindow;
show(3); press("m");
frame.contentDocument.dispatchEvent(new KeyboardEvent("keydown", {key: "PageDown", cancelable: true}));
result.from_notes = [+document.body.dataset.op, frame.contentDocument.body.textContent.split(" ")[0]];
frame.remove(); notes = null;
result.notes = notesOf(film.ops[6]).map(node => node.textContent);
press("Home"); press("q"); press("n"); $("given").value = "y";
$("question").querySelector("button[value=answer]").click();
result.reason = $("verdict").textContent; press("q");
makeSlides(); result.slides = document.querySelectorAll("#slides .slide").length;
result.printed = document.querySelectorAll("#slides .slide")[5].querySelector("canvas").getBoundingClientRect().width;
const sheets = [...document.querySelectorAll("#slides .slide")[6].querySelectorAll(".sheet")];
result.sheets = sheets.map(node => [...node.querySelectorAll("figcaption, .caption")].map(each => each.textContent));
result.left = [onPaper, document.querySelectorAll("#slides .controls, #arrays .sheet").length];
result.tall = [...document.querySelectorAll("#slides .slide .arrays")].filter(node => node.scrollHeight > 720).length;
"""
    + TELL
)


@needs_chromium
def test_a_cell_lights_up_what_it_comes_from(tmp_path: Path) -> None:
    found = browse(tmp_path, page_of(film_of()), "1366,900", LIGHTS)
    assert found["errors"] == []
    row = [["x", 1, 2, k] for k in range(2)] + [["W", 1, 3, k] for k in range(2)] + [["y_partial", 1, 2, 3]]
    assert found["product"]["lit"] == row
    assert "= row 2 of x times row 3 of W, rank 1's summand" in found["product"]["text"]
    assert found["sum"]["lit"] == [["y_partial", rank, 1, 2] for rank in range(3)] + [["y", r, 1, 2] for r in range(3)]
    given, made = film_of().ops[6].arrays
    total = " + ".join(str(picture.values[1][2]) for picture in given.pictures).replace("+ -", "\u2212 ")
    assert found["sum"]["text"] == f"{total} = {made.pictures[0].values[1][2]}"
    columns = [["dy", 0, k, 1] for k in range(4)] + [["x", 0, k, 2] for k in range(4)] + [["dW", 0, 1, 2]]
    assert sorted(found["grad"]["lit"]) == sorted(columns)
    assert (found["tip"], found["changed"], found["back"]) == ("block", True, True)


def check_cuts(found: list[Any]) -> None:
    sizes = film_of().sizes
    for ranks, heads, kv, shown in found:
        units = {**sizes["units"], "heads": heads, "KV heads": kv}
        for cut, of_page in zip(cuts(Sizes(**{**sizes, "units": units}), ranks), shown, strict=True):
            spans = {"query": cut.query, "columns": cut.columns, "vocabulary": cut.vocabulary}
            for name, span in spans.items():
                assert range(*of_page[name]) == span or not (span or range(*of_page[name]))
            assert list(range(*of_page["kv"])) == list(cut.kv)
            assert (of_page["params"], of_page["handed_bytes"]) == (cut.params, cut.handed_bytes)


@needs_chromium
def test_the_tour_of_a_page_with_several_films(tmp_path: Path) -> None:
    films, left_out = make_films(Wish(), (3, 1, 2))
    assert [(film.ranks, film.invariant) for film in films] == [
        (3, False), (3, True), (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip
    assert left_out == []
    found = browse(tmp_path, page_of(films), "1366,900", TOUR)
    assert found["errors"] == []
    assert found["films"] == ["1 rank", "2 ranks", "3 ranks", "invariant"]
    out = "blocks.0.attention.out"
    assert found["two"] == [2, False, 7, out] and found["invariant"] == [2, True, 7, out]
    assert found["one"][:2] == [1, False] and found["one"][3] == out and found["three"] == [3, False, 7, out]
    assert found["rounds"][0].startswith("before: 4 rounds; rank 0 sends 84 B in all")
    assert [text.split(":")[0] for text in found["rounds"][1:]] == [
        *(f"round {k} of 4" for k in range(1, 5)), "round 4 of 4",
    ]  # fmt: skip
    assert found["tree"].startswith("round 1 of 4: 1 message of 64 B") and "in backward: copy" in found["conjugate"]
    everyone = [["01234"] * 5] * 5
    assert all(found["ends"][f"all_reduce {way}"] == everyone for way in ALGORITHMS["all_reduce"])
    assert found["ends"]["all_gather ring"] == [[str(k) for k in range(5)]] * 5
    assert all(node[rank] == "01234" for rank, node in enumerate(found["ends"]["reduce_scatter ring"]))
    assert all(node[5:] == [str(k) for k in range(5)] for node in found["ends"]["all_to_all direct"])
    check_cuts(found["grid"])
    assert found["sliders"] == [True, 5 * 4] and found["slid"] == 5 * 6
    assert found["gallery"] == ["forward: all-reduce", "backward, its conjugate: copy"]
    assert found["code"].startswith("def forward(") and "01_four_ways" in found["examples"]
    lines = Path(inspect.getsourcefile(RowParallelLinear) or "").read_text(encoding="utf-8").splitlines()
    told = found["code"].splitlines()
    assert [lines[number - 1].strip() for number in found["numbers"][: len(told)]] == [line.strip() for line in told]
    assert found["place"] == f"mpitp/layers/linear.py, line {found['numbers'][0]}: RowParallelLinear.forward"
    title, text, command = found["second"]
    assert title.startswith("02  ") and command == "python examples/02_column_then_row.py"
    assert text.rstrip() == example_text("02_column_then_row.py")
    assert found["chapter"][3] == "update.norm"
    assert found["presents"] == ["present", "none"]
    assert found["printed"] > 150  # px: as large as the slide lets it be
    norm = found["chapter"][2]  # the key that lights the screen again doesn't walk, b sets no breakpoint
    assert found["darkened"] == ["present", 0, norm, "present darkened", "", "blocks.0.attention.heads"]
    assert found["told"] and found["from_notes"] == [4, "4"]
    assert found["notes"][0].startswith("7 of 55. blocks.0.attention.out") and any("Ask: " in n for n in found["notes"])
    assert found["reason"].startswith("right: yes, all_reduce sum") and guide(film_of().ops[1]).why in found["reason"]
    assert found["slides"] == 55 and found["tall"] == 0
    assert found["scrollbar"] == "none" and found["left"] == [False, 0]
    whole, conjugate = found["sheets"]  # on paper all rounds of the sum are seen, and what the other pass does
    assert whole[0].startswith("by ring, before: 4 rounds; rank 0 sends 84 B") and whole[1] == "before"
    told = {1: "adds up", 2: "adds up", 3: "is kept", 4: "is kept"}
    assert whole[2:] == [f"round {number}: what comes {what}" for number, what in told.items()]
    assert conjugate[0] == "nothing is sent"


@needs_chromium
def test_printing_gives_a_slide_an_operation(tmp_path: Path) -> None:
    path, paper = tmp_path / "page.html", tmp_path / "slides.pdf"
    film = film_of("llama", 2)
    few = replace(film, ops=[replace(op, conjugate=None) for op in film.ops[:9]])
    path.write_text(page_of(few))
    chromium(tmp_path, "--virtual-time-budget=2000", "--no-pdf-header-footer", f"--print-to-pdf={paper}", path.as_uri())
    pages = paper.read_bytes().count(b"/Type /Page\n") + paper.read_bytes().count(b"/Type /Page ")
    assert pages == 9


@pytest.mark.parametrize("path", ["base.js", "sends.js", "sliders.js", "style.css", "page.html"])
def test_parts_travel_with_the_package(path: str) -> None:
    from importlib import resources

    assert resources.files("mpitp.step").joinpath("web", path).is_file()
