"""The page's numbers on layouts are the cost function's own: the file in web/ is what its script makes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from mpitp.step.page import page_of
from tests.step.browser import CHROME_LINES, browse, needs_chromium
from tests.step.films import film_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "layout_table.py"
TOLD = """
<script>
document.dispatchEvent(new KeyboardEvent("keydown", {key: "l", bubbles: true, cancelable: true}));
const text = () => [...$("plan-table").children].map(node => node.textContent);
const result = {open: $("layouts").open, first: text(), all: layoutsOf(1, 1, 4)};
for (const id of ["plan-machine", "plan-model", "plan-ranks"]) {
  $(id).value = $(id).max; $(id).dispatchEvent(new Event("input"));
}
result.last = text(); result.note = $("plan-note").textContent;
const told = Object.assign(document.createElement("pre"), {id: "result"});
told.textContent = JSON.stringify({...result, errors});
document.body.replaceChildren(told);
</script>
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(("machine", "model"), [(0, 0), (3, 1)])
def test_the_file_is_what_the_cost_function_says(script: dict[str, Any], machine: int, model: int) -> None:
    told = json.loads(script["TABLE"].read_text(encoding="utf-8"))
    assert told["ranks"] == list(script["RANKS"]) and told["parts"] == list(script["PARTS"])
    on = list(script["machines"]().values())[machine]
    anatomy = script["anatomy_of"](on, script["MODELS"][model])
    for place, ranks in enumerate(told["ranks"]):
        found = script["rows_of"](anatomy, script["MODELS"][model], ranks)
        shown = told["rows"][machine][model][place]
        for ours, row in zip(sorted(found), sorted(shown), strict=True):
            assert ours[:3] == row[:3], "python scripts/layout_table.py makes it anew"
            assert row[3:] == pytest.approx(ours[3:], rel=2e-3, abs=2e-9), (
                "python scripts/layout_table.py makes it anew"
            )


def test_every_part_of_a_step_is_told(script: dict[str, Any]) -> None:
    from mpitp.plan.search_report import LIMITS

    assert sorted(name for names in script["PARTS"].values() for name in names) == sorted(LIMITS)


@needs_chromium
def test_sliders_over_machine_model_and_ranks(tmp_path: Path, script: dict[str, Any]) -> None:
    found = browse(tmp_path, page_of(film_of()), f"1366,{768 + CHROME_LINES}", TOLD)
    table = json.loads(script["TABLE"].read_text(encoding="utf-8"))
    assert found["errors"] == [] and found["open"]
    rows = {tuple(row[:3]): row for row in table["rows"][1][1][4]}
    room = table["machines"][1]["memory"]
    for shown in found["all"]:
        tp, pp, dp, memory, *parts = rows[shown["tp"], shown["pp"], shown["dp"]]
        assert (shown["memory"], shown["parts"], shown["fits"]) == (memory, parts, memory <= room)
        assert shown["seconds"] == pytest.approx(sum(parts))
    assert len(found["all"]) == len(rows) and found["first"][0] == "layout"
    assert found["last"] != found["first"] and "8 ranks a node" in found["note"] and "layouts fit into" in found["note"]
