"""The small model in the page gives mpitp's numbers at any number of ranks: each rank's parts, the sums, the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.checkpoint.load import load_model
from mpitp.comm import Group, run_threads
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.step.page import page_of
from mpitp.step.tiny_model import DIRECTORY, tiny_model
from tests.step.browser import browse, needs_chromium
from tests.step.films import film_of

TEXT = "The café of 3 names"
IDS = list(TEXT.encode())
RANKS = (1, 2, 3, 4, 7)
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # float32 against sums in float64 that are rounded to float32

RUNS = """
<script>
const flat = matrix => ({rows: matrix.rows, cols: matrix.cols, at: [...matrix.at]});
const result = {errors, runs: Object.fromEntries(RANKS.map(ranks => {
  const run = runTiny(IDS, ranks);
  return [ranks, {sums: run.sums.map(each => ({name: each.name, parts: each.parts.map(flat), whole: flat(each.whole)})),
    logits: run.logits.map(flat), probabilities: run.probabilities,
    attention: run.attention.flat().map(each => ({...each, weights: flat(each.weights)}))}];
}))};
openOwnText();
result.chips = [...document.querySelectorAll("#own-tokens button")].map(node => node.textContent).join("");
$("own-given").value = "wörd"; $("own-given").dispatchEvent(new Event("input"));
result.typed = [...document.querySelectorAll("#own-tokens button")].map(node => node.textContent);
$("own-ranks").value = 4; $("own-ranks").dispatchEvent(new Event("input"));
const count = words => document.querySelectorAll(words).length;
result.drawn = [count("#own-parts canvas"), count("#own-attention canvas"), count("#own-next code")];
$("own-write").click();
result.written = $("own-given").value;
$("own-given").value = ""; $("own-given").dispatchEvent(new Event("input"));
result.empty = $("own-note").textContent;
$("own-given").value = "é".repeat(64); $("own-given").dispatchEvent(new Event("input"));
result.long = [$("own-note").textContent, document.querySelectorAll("#own-tokens button").length];
const told = Object.assign(document.createElement("pre"), {id: "result", textContent: JSON.stringify(result)});
document.body.replaceChildren(told);
</script>
""".replace("RANKS", str(list(RANKS))).replace("IDS", str(IDS))


class Parts(GroupObserver):
    """What a rank hands in to sums of rows."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        self.seen += [array.copy() for array in arrays if array.ndim == 2 and array.shape[1] == 48]
        return run()


def on_rank(group: Group) -> tuple[list[np.ndarray], np.ndarray]:
    parts = Parts()
    model = load_model(DIRECTORY, make_site(ObservedGroup(group, parts, "all", whole_sums=True)))
    logits, _ = model.forward(Batch.of_rows(np.array([IDS])))
    return parts.seen, logits


def array(found: dict[str, Any]) -> np.ndarray:
    return np.array(found["at"], np.float32).reshape(found["rows"], found["cols"])


@needs_chromium
def test_the_page_computes_what_the_ranks_compute(tmp_path: Path) -> None:
    found = browse(tmp_path, page_of(film_of("llama", 2)), "1366,900", RUNS)
    assert found["errors"] == []
    for ranks in RANKS:
        run, own = found["runs"][str(ranks)], run_threads(ranks, on_rank)
        assert [each["name"] for each in run["sums"]] == [
            "embedding", "blocks.0.attention.out", "blocks.0.mlp.down", "blocks.1.attention.out", "blocks.1.mlp.down",
        ]  # fmt: skip
        for rank, (parts, logits) in enumerate(own):
            np.testing.assert_allclose(array(run["logits"][rank]), logits, **CLOSE)
            if ranks > 1:
                assert len(parts) == len(run["sums"])
            for given, of_page in zip(parts, run["sums"], strict=False):
                np.testing.assert_allclose(array(of_page["parts"][rank]), given, **CLOSE)
        for of_page in run["sums"]:
            total = np.sum([array(part) for part in of_page["parts"]], axis=0)
            np.testing.assert_allclose(array(of_page["whole"]), total, **CLOSE)
        whole = np.concatenate([logits for _, logits in own], axis=1).astype(np.float64)
        powers = np.exp(whole - whole.max(axis=1, keepdims=True))
        np.testing.assert_allclose(
            run["probabilities"], powers / powers.sum(axis=1, keepdims=True), rtol=1e-3, atol=1e-6
        )
        assert [(each["head"], each["kv"]) for each in run["attention"]] == [(h, h // 3) for h in range(6)] * 2
        for each in run["attention"]:
            weights = array(each["weights"])
            np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)
            assert not np.triu(weights, 1).any()
    check_what_is_typed(found)


def check_what_is_typed(found: dict[str, Any]) -> None:
    assert found["chips"].startswith("The␣value") and found["typed"] == ["w", "xc3", "xb6", "r", "d"]
    assert found["drawn"] == [5, 6, 12]
    assert found["written"].startswith("wörd") and len(found["written"]) == 5
    assert found["empty"] == "type something" and found["long"] == ["the model sees the last 64 bytes", 64]


def test_it_has_learned_and_is_small() -> None:
    told = tiny_model()
    assert len(told["weights"]) < 140_000 and len(told["tensors"]) == 2 * 9 + 2
    model = load_model(DIRECTORY, make_site(run_threads(1, lambda group: group)[0]))
    ids = np.array([list(b"The value of the name is a string that is used to find the ")])
    batch = Batch.of_rows(ids[:, :-1], targets=ids[:, 1:])
    loss, _ = model.loss_forward(batch)
    assert loss / batch.num_targets < 1.5 < np.log(257)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_it_travels_with_the_package(name: str) -> None:
    assert (DIRECTORY / name).is_file()
