"""What README and docs show works as it stands there: lines of Python, an error, the list of faults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpitp.comm
from examples.planted_bugs import FAULTS
from mpitp.checkpoint import Documents, load_model, save_model
from mpitp.comm import Group, SerialGroup, abstract_mesh, make_mesh, run_threads
from mpitp.errors import PlacementError
from mpitp.layers import CopyToTP, make_site
from mpitp.models import Batch, abstract_model, config_from_hf, new_model
from tests.models.model_cases import LLAMA

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOKENS = np.random.default_rng(1).integers(0, 53, (2, 9))


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    model = new_model(config_from_hf(LLAMA), make_site(SerialGroup()), seed=1)
    save_model(model, tmp_path / "models" / "smollm2", SerialGroup(), Documents(LLAMA))
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_lines_of_python_work(
    ranks: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *_ = re.findall(r"```python\n(.*?)```", page("python"), re.DOTALL)
    monkeypatch.chdir(model_dir)

    def run(group: Group) -> Any:
        names: dict[str, Any] = {"group": group}
        exec(first.replace("make_mesh(world_group())", "make_mesh(group)"), names)
        exec(second, names)
        return names["loss"]

    losses = run_threads(ranks, run)
    assert len(set(losses)) == 1 and 3 < losses[0] < 5
    printed = capsys.readouterr().out
    assert "blocks.1.attention.qkv I along tp -> V along tp" in printed
    assert "blocks.0.attention.qkv.weight q (slice(0, " in printed


def test_two_models_stand_side_by_side_in_one_job(model_dir: Path) -> None:
    assert 'make_site(make_mesh(world, {"dp": 2})["tp"])' in page("python")

    def loss(group: Group) -> float:
        site = make_site(make_mesh(group, {"dp": 2})["tp"])
        model = load_model(model_dir / "models" / "smollm2", site)
        model_number = group.rank // 2  # each has a batch of its own
        batch = Batch.of_rows(TOKENS[model_number : model_number + 1, :-1], TOKENS[model_number : model_number + 1, 1:])
        summed, ctx = model.loss_forward(batch)
        model.loss_backward(ctx, 1.0)
        return summed

    alone = load_model(model_dir / "models" / "smollm2", make_site(SerialGroup()))
    wanted = [alone.loss_forward(Batch.of_rows(TOKENS[i : i + 1, :-1], TOKENS[i : i + 1, 1:]))[0] for i in (0, 1)]
    assert abs(wanted[0] - wanted[1]) > 1e-3
    np.testing.assert_allclose(run_threads(4, loss), [wanted[0]] * 2 + [wanted[1]] * 2, rtol=1e-5)


class NoCopy(CopyToTP):
    """Says that it does nothing."""

    def placements(self, incoming: Any) -> Any:
        return incoming


def test_the_error_is_told_as_shown() -> None:
    model = abstract_model(config_from_hf(LLAMA), make_site(abstract_mesh({"tp": 2})))
    model["blocks.1.attention.qkv"].copy = NoCopy(model.site.summation())
    with pytest.raises(PlacementError) as caught:
        model.types()
    assert str(caught.value) in " ".join(page("design").split())


def test_the_faults_that_types_tell_are_listed() -> None:
    for text, is_told in (("types tell", True), ("only numbers tell", False)):
        row = re.search(rf"^\| {text} \| (.*) \|$", page("numbers"), re.MULTILINE)
        assert row and row[1].split("; ") == [name for name, fault in FAULTS.items() if fault.types == is_told]


def test_the_door_has_what_the_pages_name() -> None:
    for module, names in re.findall(r"from (mpitp[\w.]*) import ([\w, ]+)", page("python")):
        loaded = __import__(module, fromlist=["x"])
        assert [name for name in names.split(", ") if not hasattr(loaded, name)] == []
    assert mpitp.comm.make_mesh is make_mesh
