"""The page in a real headless Chromium: drawn, walked by keys and clicks, dark and light, without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpitp.cli import main
from mpitp.step.page import Start, page_of
from tests.step.browser import browse, chromium, needs_chromium, walk_page
from tests.step.films import film_of

# Presses keys and clicks as a reader would, and leaves what it saw in the page.
ACTIONS = """
<script>
const seen = [], look = name => seen.push({
  name, op: +document.body.dataset.op, title: document.querySelector("#about h2")?.textContent,
  arrays: [...document.querySelectorAll("#arrays code")].map(node => node.textContent),
  canvases: document.querySelectorAll("#arrays canvas").length,
  chips: [...document.querySelectorAll("#arrays .chip")].map(node => node.className),
  now: [...document.querySelectorAll(".op.now")].map(node => +node.dataset.op),
  pair: [...document.querySelectorAll(".op.pair")].map(node => +node.dataset.op),
  theme: document.documentElement.dataset.theme, background: getComputedStyle(document.body).backgroundColor,
});
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
look("start");
press("ArrowRight"); look("right");
press("ArrowLeft"); look("left");
press("x"); press("x"); look("second collective");
press("j"); look("conjugate");
document.querySelector("#jump").click(); look("jump back");
document.querySelector('[data-op="23"] rect').dispatchEvent(new MouseEvent("click", {bubbles: true})); look("click");
press("End"); look("end");
press("ArrowRight"); look("still the end");
press("t"); look("other theme");
press("Home"); look("home");
const pixels = document.querySelector("#arrays canvas").getContext("2d").getImageData(0, 0, 60, 20).data;
const wide = document.documentElement.scrollWidth <= window.innerWidth;
const result = {seen, errors, wide, colours: new Set(pixels).size,
  ops: document.querySelectorAll("#timeline .op").length,
  requests: performance.getEntriesByType("resource").length};
const told = Object.assign(document.createElement("pre"), {id: "result", textContent: JSON.stringify(result)});
document.body.replaceChildren(told);
</script>
"""
PREDICT = """
<script>
const seen = [];
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const look = () => seen.push([+document.body.dataset.op, $("score").textContent, $("hint").textContent,
  $("verdict")?.className ?? "", $("question").open]);
const answer = text => { $("given").value = text; $("question").querySelector("button[value=answer]").click(); };
look();
press("ArrowRight"); look();
answer("1a"); look();
answer(film.ops[now].question.right); look();
press("n"); answer(film.ops[now].question.right === "n" ? "y" : "n"); look();
press("PageDown"); $("question").querySelector("button[value=back]").click(); look();
press("q"); press("ArrowRight"); look();
press("Home"); press("c"); look(); press("b"); press("Home"); press("c"); look();
const told = Object.assign(document.createElement("pre"), {id: "result"});
told.textContent = JSON.stringify({seen, errors});
document.body.replaceChildren(told);
</script>
"""


@needs_chromium
@pytest.mark.parametrize("size", ["1366,900", "1024,768"], ids=["laptop", "projector"])
def test_page_in_a_browser(tmp_path: Path, size: str) -> None:
    film = film_of()
    found = browse(tmp_path, page_of(film), size, ACTIONS)
    assert found["errors"] == [] and found["requests"] == 0
    assert found["ops"] == len(film.ops)
    assert found["colours"] > 3, "matrices are coloured"
    assert found["wide"], "nothing sticks out sideways"
    seen = {each["name"]: each for each in found["seen"]}
    numbers = {name: each["op"] for name, each in seen.items()}
    assert numbers == {
        "start": 1, "right": 2, "left": 1, "second collective": 7, "conjugate": 34, "jump back": 7, "click": 23,
        "end": 55, "still the end": 55, "other theme": 55, "home": 1,
    }  # fmt: skip
    collective = seen["second collective"]
    assert (collective["now"], collective["pair"]) == ([7], [34]), "the conjugate is marked"
    assert collective["title"] == "blocks.0.attention.out"
    assert collective["arrays"] == ["y_partial [4, 4]", "y [4, 4]"]
    assert collective["chips"] == ["chip partial", "chip replicated"]
    assert collective["canvases"] == film.ranks + 1, "the summands, and their sum once"
    assert seen["end"]["theme"] != seen["other theme"]["theme"]
    assert seen["end"]["background"] != seen["other theme"]["background"]


@needs_chromium
@pytest.mark.parametrize(
    ("preset", "size", "letters"),
    [
        ("gpt2", (1366, 625), 13),  # a window on a laptop's screen of 768 lines
        ("llama", (1366, 768), 14.5),  # the whole screen
        ("qwen2", (1920, 1080), 20),
    ],
)
def test_every_operation_is_clean_in_both_themes(
    tmp_path: Path, preset: str, size: tuple[int, int], letters: float
) -> None:
    width, height = size
    found = walk_page(tmp_path, page_of(film_of(preset)), width, height)
    assert found["height"] == height and found["letters"] >= letters
    assert found["errors"] == found["faults"] == []
    assert found["largest"] <= 1, "the first operation's arrays are seen without scrolling"
    if height > 700:
        assert found["below"] == [], "no array lies under the footer"
        assert found["largest"] > 0.6, "the screen is used"


@needs_chromium
def test_predicting_in_the_page(tmp_path: Path) -> None:
    """What is no answer doesn't count; a wrong one is told with the reason; breakpoints of the command line hold."""
    page = page_of(film_of(), Start(at=3, breaks=("mlp.down",), predicts=True))
    found = browse(tmp_path, page, actions=PREDICT)
    assert found["errors"] == []
    assert found["seen"] == [
        [3, "predict: 0 of 0", "", "", False],
        [3, "predict: 0 of 0", "", "", True],
        [3, "predict: 0 of 0", '"1a" is no answer; numbers, like 4, 6', "", True],
        [4, "predict: 1 of 1", "", "card right", False],
        [5, "predict: 1 of 2", "", "card wrong", False],
        [5, "predict: 1 of 2", "", "card wrong", False],
        [6, "predict: 1 of 2", "", "", False],
        [12, "predict: 1 of 2", "", "", False],
        [12, "predict: 1 of 2", "", "", False],
    ]


@needs_chromium
def test_page_can_be_photographed(tmp_path: Path) -> None:
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page_of(film_of("gpt2", 2)))
    chromium(tmp_path, "--window-size=1366,900", f"--screenshot={picture}", f"{path.as_uri()}#8")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 30_000


def test_page_loads_nothing() -> None:
    page = page_of(film_of())
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, not an address that is loaded"
    assert not re.search(r"<(link|img|iframe)\b|@import|url\(|\bfetch\(|XMLHttpRequest|<script src", page)
    assert page.count("</script>") == 1


def test_page_is_written_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.html"
    assert main(["step", "-n", "2", "--html", str(path)]) == 0
    assert '"ranks":2' in path.read_text()
    words = ["step", "-n", "2", "--html", str(path), "--at", "5", "--break", "mlp", "--predict"]
    assert main(words) == 0
    assert '"start":{"at":5,"breaks":["mlp"],"predicts":true}' in path.read_text()
    assert main(["step", "--html", str(path), "--break", "no such layer"]) == 2
    assert main(["step", "--html", str(path), "--at", "999"]) == 2
    assert main(["step", "--html", str(tmp_path)]) == 4
    assert main(["step", "--html", str(tmp_path / "no" / "out.html")]) == 4
    assert "can't write the page" in capsys.readouterr().err
