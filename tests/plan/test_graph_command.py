"""`mpitp plan graph`: text, picture and data agree, nothing overlaps, and mistakes are told in one message."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpitp.cli import main
from mpitp.layers.layer import walk
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.plan.anatomy import Cut
from mpitp.plan.graph_picture import LETTER
from mpitp.plan.graph_text import amount, duration, folded_names
from mpitp.plan.node_seconds import node_seconds, spread
from mpitp.plan.operations import PRODUCT
from mpitp.plan.step_graph import step_graph
from mpitp.plan.sums import Span
from mpitp.plan.work import Sequences, seconds_of, work_of
from tests.plan.cases import anatomy_of, decoder_of, run_of
from tests.plan.test_graph import LLAMA, NEOX

MACHINE = Path(__file__).parents[2] / "examples/machines/ethernet_cpu.toml"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 12}))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["plan", "graph", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_text_shows_stages_and_one_block_opened(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", model, "--ranks", 8, "--mesh", "tp=4,pp=2", "--open", 3, "--machine", MACHINE)
    assert "stage 0 (ranks 0-3): embedding, blocks 0-2, blocks.3, blocks 4-" in out
    assert "blocks.3, opened" in out and "on the last rank along tp" in out  # nine heads on four ranks
    assert "attention.qkv" in out and "tp:P" in out
    assert out.count("=   all_reduce sum along tp of 4") == 5  # four activations, and KV heads on several ranks
    assert " us" in out and "optimizer" in out


def test_data_has_every_node_of_every_stage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        run(capsys, "--model", model, "--ranks", 12, "--mesh", "tp=2,pp=3,dp=2", "--format", "json", "--seq", 64)
    )
    assert [stage["stage"] for stage in found["stages"]] == [0, 1, 2]
    for stage in found["stages"]:
        names = [node["name"] for node in stage["first_rank"]]
        assert len(names) == len(set(names))
        assert all(set(node["inputs"]) <= set(names) for node in stage["first_rank"])
        assert [node["collective"] for node in stage["update"] if "collective" in node][-1] == "broadcast"
    sends = [node for node in found["stages"][0]["first_rank"] if node.get("axis") == "pp"]
    assert [node["collective"] for node in sends] == ["send", "recv"]
    assert sends[0]["given_bytes"] == 64 * 48 * 4


@pytest.mark.parametrize("kind", [LLAMA, NEOX], ids=["llama", "parallel blocks"])
@pytest.mark.parametrize("mesh", ["tp=4,pp=2", "tp=1,pp=12", "tp=3,dp=2"])
def test_nothing_overlaps_in_the_picture(
    kind: dict[str, object], mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Boxes lie apart or one within the other; words end within the box in which they begin."""
    (tmp_path / "config.json").write_text(json.dumps({**kind, "num_hidden_layers": 12}))
    out = tmp_path / "graph.svg"
    ranks = {"tp=4,pp=2": 8, "tp=1,pp=12": 12, "tp=3,dp=2": 6}[mesh]
    run(capsys, "--model", tmp_path, "--ranks", ranks, "--mesh", mesh, "--machine", MACHINE, "--out", out)
    root = ElementTree.fromstring(out.read_text())
    boxes = [
        tuple(float(each.attrib[key]) for key in ("x", "y", "width", "height"))
        for each in root.iter(f"{SVG}rect")
        if "x" in each.attrib and float(each.attrib["height"]) > 20
    ]
    assert len(boxes) > 12
    assert [pair for pair in combinations(boxes, 2) if not _apart_or_within(*pair)] == []
    width = float(root.attrib["width"])
    for text in root.iter(f"{SVG}text"):
        length = len(text.text or "") * (LETTER if "soft" not in text.attrib["class"] else 6.4)
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        begin, end = (x - length, x) if text.attrib["text-anchor"] == "end" else (x, x + length)
        inside = [box for box in boxes if box[0] <= x <= box[0] + box[2] and box[1] < y < box[1] + box[3]]
        assert begin >= 0 and end <= width
        assert all(box[0] <= begin and end <= box[0] + box[2] for box in inside), text.text
    assert "prefers-color-scheme:dark" in out.read_text()


def _apart_or_within(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    inside = [
        one[0] >= two[0]
        and one[1] >= two[1]
        and one[0] + one[2] <= two[0] + two[2]
        and one[1] + one[3] <= two[1] + two[3]
        for one, two in ((a, b), (b, a))
    ]
    apart = a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]
    return apart or any(inside)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--ranks", "2", "--open", "99"], "the model has blocks 0 to 11, and embedding, final_norm, head, loss"),
        (["--ranks", "2", "--mesh", "tp:2"], "such as tp=2,pp=2"),
        (["--ranks", "2", "--mesh", "tp=3"], "the job has 2"),
        (["--ranks", "13", "--mesh", "pp=13"], "13"),
        (["--ranks", "2", "--seq", "0"], "--seq must be at least 1"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_mistakes_are_told(words: list[str], told: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "graph", "--model", str(model), *words]) in (2, 3)
    assert told in capsys.readouterr().err


def test_words_for_numbers() -> None:
    assert [amount(x, "F") for x in (0, 12, 1234, 5.678e9, 9.9996e14)] == ["0 F", "12 F", "1.23 kF", "5.68 GF", "1 PF"]
    assert [duration(x) for x in (2.5, 3.2e-3, 4e-6, 5e-9)] == ["2.5 s", "3.2 ms", "4 us", "5 ns"]
    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert folded_names(names, "blocks.2") == ["embedding", "blocks 0-1", "blocks.2", "blocks.3", "head"]


def test_groups_on_nodes() -> None:
    """The ranks of tp are neighbours; those of dp are far apart."""
    sizes = {"pp": 2, "dp": 4, "ep": 1, "cp": 1, "tp": 8}
    assert spread(sizes, ("tp",), 8) == Span(8, 1)
    assert spread(sizes, ("tp",), 4) == Span(4, 2)
    assert spread(sizes, ("dp",), 8) == Span(1, 4)
    assert spread(sizes, ("dp",), 16) == Span(2, 2)
    assert spread(sizes, ("pp", "dp", "ep", "cp", "tp"), 8) == Span(8, 8)


def test_products_take_as_long_as_in_the_cost_of_a_layout() -> None:
    """Of everything but attention, whose tiles the graph takes whole."""
    config = run_of("gpt2", {"data.seq_len": 16})
    anatomy, graph = anatomy_of(config), step_graph(config, decoder_of(config), 1)
    nodes = [node for node in graph.stages[0].first.operations if node.kind == PRODUCT]
    told = sum(node_seconds(node, anatomy.machine, graph.sizes, "float32") for node in nodes)
    sizes, model = anatomy.sizes(Cut(1, 1, False, 2), 0), anatomy.layers(1, 0, 1, False, 1)[0]
    found = 0.0
    for name in anatomy.names:
        for _, layer in walk({"": model.layers[anatomy.like[name]]}):
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                both = work_of(layer, sizes, Sequences(16))
                works = (replace(each, passes=()) for each in (both.forward, both.input_grad, both.weight_grad))
                found += sum(seconds_of(work, anatomy.machine, "float32").total for work in works)
    assert told == pytest.approx(found)
