from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path

import pytest

from mpitp import cli
from mpitp.pipeline.schedules import make_schedule
from mpitp.pipeline.simulate import Durations, simulate
from mpitp.plan import picture
from mpitp.plan.schedule_report import make_report, words_of
from mpitp.plan.text_chart import text_chart

PLAN = ["plan", "schedule", "--pp", "4", "--microbatches", "8"]


def test_chart_by_hand() -> None:
    assert text_chart(simulate(make_schedule("1f1b", 2, 2)), 37).splitlines() == [
        "   0                         9  held",
        "0 |F0=F1=      B0----   B1----|    2",
        "1 |   F0=B0----F1=B1----      |    1",
        "F forward, B backward",
    ]


@pytest.mark.parametrize("columns", [30, 57, 80, 200])
@pytest.mark.parametrize(("name", "chunks"), [("zb", 1), ("gpipe", 1), ("interleaved", 2)])
def test_chart_fits_the_width(name: str, chunks: int, columns: int) -> None:
    chart = text_chart(simulate(make_schedule(name, 4, 8, chunks)), columns).splitlines()
    assert len(chart) == 6
    assert all(len(line) <= columns for line in chart[:5])
    assert len({len(line) for line in chart[:5]}) == 1


def test_command_says_bubble_activations_and_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*PLAN, "--schedule", "zb"]) == 0
    printed = capsys.readouterr().out
    assert "0 |F0F1F2F3      I0W0F4I1W1F5I2W2" in printed
    assert "bubble: 11.1% of the stages' time is idle (gpipe 27.3%, 1f1b 27.3%)" in printed
    assert "stage 0 to 3: 4 4 4 4\n" in printed
    assert "limit: the pipeline fills and drains in 3 of 27, no more with more microbatches: from 9 on" in printed


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
def test_the_number_of_microbatches_that_is_named_is_the_least(schedule: str) -> None:
    def limit_and_bubble(microbatches: int) -> tuple[str, float]:
        report = make_report(schedule, (4, microbatches, 2 if schedule == "interleaved" else 1), Durations())
        return report.limit, report.timeline.bubble

    step = 4 if schedule == "interleaved" else 1
    enough = int(limit_and_bubble(4)[0].split("from ")[1].split()[0])
    assert limit_and_bubble(enough)[1] <= 0.1 + 1e-12 < limit_and_bubble(enough - step)[1]
    assert "from" not in limit_and_bubble(enough)[0]


def test_limits() -> None:
    assert make_report("1f1b", (1, 3, 1), Durations()).limit == "none: one stage is never idle"
    assert make_report("1f1b", (4, 2, 1), Durations()).limit == "2 microbatches never fill 4 stages; 4 or more do"
    assert make_report("1f1b", (4, 8, 1), Durations(send=5.0)).limit.startswith("messages: waiting for them takes ")
    some = make_report("1f1b", (2, 2, 1), Durations(send=0.5)).limit
    assert some.startswith("the pipeline fills and drains in 3 of 9 (beside 1 for messages), no more")


def test_json_has_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--schedule", "interleaved", "--times", "1,1,2", "--send", "0.5", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["chunks"] == 2 and facts["in_flight"] == [11, 9, 7, 5]
    assert facts["times"] == {"forward": 1.0, "input_grad": 1.0, "weight_grad": 2.0, "send": 0.5}
    assert len(facts["actions"]) == 4 * 8 * 2 * 2
    assert max(action["stop"] for action in facts["actions"]) == facts["length"]


def test_svg_has_a_bar_for_every_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "chart.svg"
    out.write_text("old")
    assert cli.main([*PLAN, "--schedule", "zb", "--out", str(out)]) == 0
    root = ET.parse(out).getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 4 * 8 * 3 and "input gradients of microbatch 7: 23 to 24" in titles
    assert "11.1%" in out.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["chart.svg"]
    assert f"drawn: {out}" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws with matplotlib")
def test_png(tmp_path: Path) -> None:
    out = tmp_path / "chart.png"
    picture.draw(make_report("interleaved", (4, 8, 2), Durations()), out)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_png_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    assert cli.main([*PLAN, "--out", "chart.png"]) == 2
    assert 'a .png needs matplotlib: pip install "mpitp[plot]"; a .svg needs nothing' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--schedule", "interleaved", "--microbatches", "10"], 3, "10 microbatches = 2 x 4 stages + 2; 8 or 12"),
        (["--schedule", "zb", "--chunks", "2"], 3, "schedule zb has one chunk a stage, not 2"),
        (["--chunks", "0"], 3, "schedule 1f1b has one chunk a stage, not 0"),
        (["--pp", "0"], 3, "at least 1 stage, not 0"),
        (["--microbatches", "100000"], 3, "4 stages x 100000 microbatches x 1 chunks x 3 = 1,200,000 actions"),
        (["--times", "1,2"], 2, "has 2 times with a sum of 3, expected three"),
        (["--times", "0,0,0"], 2, "has 3 times with a sum of 0, expected three"),
        (["--times", "1,x,1"], 2, "'x' is no time: expected a number from 0 up"),
        (["--send", "nan"], 2, "'nan' is no time"),
        (["--out", "chart.gif"], 2, "the name must end in .svg or .png"),
        (["--out", "/nowhere/chart.svg"], 4, "/nowhere doesn't exist or can't be written"),
    ],
)
def test_bad_input(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, *words]) == code
    said = capsys.readouterr()
    assert message in said.err and said.out == ""


@pytest.mark.parametrize("times", [(1.0, 0.0, 0.0), (0.0, 1.0, 1.0), (1e-9, 1.0, 1e9)])
def test_times_of_any_size_make_a_chart(times: tuple[float, float, float]) -> None:
    report = make_report("zb", (3, 5, 1), Durations(*times))
    assert len(text_chart(report.timeline, 80).splitlines()) == 5
    assert len(words_of(report)) == 4
    ET.fromstring(picture.svg_of(report))
