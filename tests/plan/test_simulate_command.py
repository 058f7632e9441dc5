"""`mpitp plan simulate`: words, numbers, the timeline and the plot; mistakes in one message."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpitp.cli import main
from tests.plan.cases import LLAMA

EXPERTS = [f"--set=model.{key}" for key in ("model_type=mixtral", "num_local_experts=2", "num_experts_per_tok=1")]
MACHINE = Path(__file__).parents[2] / "examples/machines/ethernet_cpu.toml"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    lines = ["[model]", *(f"{key} = {json.dumps(value)}" for key, value in LLAMA.items())]
    lines += ["[data]", 'train = "none"', "seq_len = 16", "[mesh]", "tp = 2", "pp = 2", "dp = 8"]
    lines += ["[train]", "steps = 1", 'run_dir = "none"', "global_batch_size = 64"]
    path = tmp_path / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def simulate(run_file: Path, *words: object) -> int:
    return main(["plan", "simulate", str(run_file), "--ranks", "32", "--machine", str(MACHINE), *map(str, words)])


def test_words_and_numbers(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(run_file, "--slow", "5=2", "--steps", 50, "--die", "3@0.5", "--save-every", 10) == 0
    out = capsys.readouterr().out
    assert (
        "32 ranks (" in out and "slow ranks 5 (2 x)" in out and "50 steps take" in out and "a rank dies in step" in out
    )
    found = {}
    for name, words in (("folded", []), ("whole", ["--no-fold"])):
        assert simulate(run_file, "--json", *words) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert found["folded"]["classes"] == 2 < found["whole"]["classes"] == 32
    assert found["folded"]["seconds"] == pytest.approx(found["whole"]["seconds"])
    assert found["folded"]["mean_seconds"] == pytest.approx(found["whole"]["mean_seconds"])


def test_timeline_is_whole_and_in_order(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each class, whose events follow one another and end with the step."""
    path = tmp_path / "step.json"
    assert simulate(run_file, "--trace", path, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    events = json.loads(path.read_text())["traceEvents"]
    rows = defaultdict(list)
    for event in (each for each in events if each["ph"] == "X"):
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == facts["classes"]
    for spans in rows.values():
        assert all(one[1] <= other[0] + 1e-3 for one, other in zip(spans, spans[1:], strict=False))
    last = max(stop for spans in rows.values() for _, stop in spans)
    assert last == pytest.approx(1e6 * facts["seconds"], abs=0.01)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert "alike (pp 0, dp 0, tp 0)" in names[0]


def test_weak_scaling_is_drawn(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.svg"
    assert simulate(run_file, "--plot", path, "--json") == 0
    points = json.loads(capsys.readouterr().out)["scaling"]
    assert [point["ranks"] for point in points] == [4, 8, 16, 32]
    assert points[-1]["tokens_per_second_a_rank"] <= points[0]["tokens_per_second_a_rank"]
    words = [each.text for each in ElementTree.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert {"100%", "4", "32"} <= set(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--slow", "5"], "expected RANK=FACTOR"),
        (["--slow", "99=2"], "no rank 99 among 32"),
        (["--die", "1@x"], "expected RANK@SECONDS"),
        (["--steps", "0"], "must be at least 1"),
        (["--notice-seconds", "-1"], "from 0 up"),
        (["--set", "mesh.tp=3"], "the job has 32"),
        (["--machine", "/nowhere.toml"], "can't read the machine file"),
        (["--set=mesh.ep=2", "--set=mesh.dp=4"], "but a model of type 'llama' has none"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_mistakes_are_told(words: list[str], told: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(run_file, *words) in (2, 3)
    assert told in capsys.readouterr().err


def test_experts_over_ep(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows on their way to other ranks' experts and home, on links that a node's ranks share."""
    words = [*EXPERTS, "--set=mesh.ep=2", "--set=mesh.dp=4"]
    assert simulate(run_file, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"].startswith("tp=2 pp=2 dp=4 ep=2")
    assert told["mean_seconds"]["transfer exchange over ep"] > 0
    assert told["mean_seconds"]["transfer sums over replicas of experts"] > 0


def test_the_layout_is_the_one_that_training_would_find(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """plan = "auto": the best of a search on the same machine, and not the run file's axes."""
    assert main(["plan", str(run_file), "--ranks", "32", "--machine", str(MACHINE), "--best", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]["layout"]
    assert simulate(run_file, "--set", "mesh.plan=auto", "--json") == 0
    found = capsys.readouterr()
    assert f"dp={best['dp']}" in json.loads(found.out)["layout"] or best["dp"] == 1
    assert "are not used: mesh.plan" in found.err and "on 32 ranks of" in found.err


def test_unequal_shares_are_none_of_a_plan_s(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(run_file) == 0
    even = capsys.readouterr()
    assert simulate(run_file, "--set", "mesh.shares=measured") == 0
    found = capsys.readouterr()
    assert (found.out, even.err) == (even.out, "")
    assert found.err.startswith(
        "mpitp: mesh.shares is left out of account: times and graphs of plans are those of equal"
    )
