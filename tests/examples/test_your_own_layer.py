"""A parallel layer of one's own: written through the public door alone, checked by its types, equal to one rank."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import your_own_layer
from examples.your_own_layer import CONFIG, Forgotten, GatedBottleneck, complaint, make_model, run
from mpitp.comm import Group, SerialGroup, abstract_mesh, run_threads
from mpitp.errors import ConfigError, PlacementError
from mpitp.layers import make_site
from mpitp.verify.batches import random_batch
from mpitp.verify.command import default_tolerance
from mpitp.verify.report import summary
from mpitp.verify.run import Report, Settings, verify
from tests.sharded import assert_close, gradients

SCRIPT = Path(your_own_layer.__file__)


def test_its_imports_are_the_packages_tops() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert len(modules) > 3
    assert [module for module in modules if module.count(".") > 1 or not module.startswith("mpitp")] == []


def test_it_is_about_thirty_lines() -> None:
    lines = inspect.getsource(GatedBottleneck).splitlines()
    assert len([line for line in lines if line.strip()]) <= 32


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_loss_and_gradients_are_those_of_one_rank(ranks: int) -> None:
    """Eight ranks: one has no column of the seven."""

    def arrays(group: Group) -> dict[str, np.ndarray]:
        loss, model = run(group)
        return {"loss": np.array(loss), **gradients(group, model.named_params())}

    expected = arrays(SerialGroup())
    assert {"bottleneck.up.weight/up", "bottleneck.down.weight/down", "bottleneck.gate/"} <= set(expected)
    assert all(np.abs(expected[name]).max() > 1e-3 for name in expected if "bottleneck" in name)
    assert_close(run_threads(ranks, arrays)[0], expected, 1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_array_forward_and_backward_is_that_of_one_rank(ranks: int) -> None:
    def checked(group: Group) -> Report:
        site, batch = make_site(group, dtype="float64"), random_batch(CONFIG, batch=2, seq=9, seed=3)
        return verify(site, make_model, batch, Settings(default_tolerance("float64", is_exact=False), steps=2))

    report, *others = run_threads(ranks, checked)
    assert report.ok and all(other == report for other in others)
    seen = {(row.name, row.kind) for row in report.rows}
    for layer in ("bottleneck", "bottleneck.up", "bottleneck.down"):
        assert {(layer, "y"), (layer, "dx")} <= seen
    assert {("bottleneck.gate", "grad"), ("bottleneck.gate", "update")} <= seen


def test_what_every_rank_is_told_of_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(self: GatedBottleneck, dy: np.ndarray, ctx: tuple) -> np.ndarray:
        """Its sum of dx over the ranks is left out."""
        up_ctx, act, down_ctx, branch = ctx
        self.gate.accumulate((dy * branch).sum(axis=0))
        dsquare = self.down.backward(dy * self.gate.data, down_ctx)
        return dy + (2 * act * dsquare) @ self.up.product.weight.data

    def checked(group: Group) -> tuple[bool, str]:
        site, batch = make_site(group, dtype="float64"), random_batch(CONFIG, batch=2, seq=9, seed=3)
        report = verify(site, make_model, batch, Settings(default_tolerance("float64", is_exact=False), steps=1))
        return report.ok, summary(report, [], group.size)

    monkeypatch.setattr(GatedBottleneck, "backward", backward)
    told = run_threads(3, checked)
    assert told[0] == told[1] == told[2] and not told[0][0] and "bottleneck" in told[0][1]


def test_types_that_are_forgotten_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedBottleneck, "placements", lambda self, incoming: None)
    with pytest.raises(PlacementError, match=r"bottleneck: placements\(\) of GatedBottleneck returns None; it must"):
        make_model(make_site(SerialGroup()))


def test_a_forward_without_its_context_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass, and where every layer is looked at, inside others too; two rows would unpack in silence."""
    original = GatedBottleneck.forward
    monkeypatch.setattr(GatedBottleneck, "forward", lambda self, x, run=None: original(self, x, run)[0])
    with pytest.raises(ConfigError, match=r"^GatedBottleneck.forward returns an array \[18, 12\], .*`return y, ctx`"):
        run(SerialGroup())
    observed = r"^bottleneck: GatedBottleneck.forward returns an array \[\d+, 12\], expected y and its context"
    site, batch = make_site(SerialGroup(), dtype="float64"), random_batch(CONFIG, batch=2, seq=9, seed=3)
    with pytest.raises(ConfigError, match=observed):
        verify(site, make_model, batch, Settings(default_tolerance("float64", is_exact=False)))
    monkeypatch.setattr(GatedBottleneck, "forward", lambda self, x, run=None: (*original(self, x, run), None))
    with pytest.raises(ConfigError, match=r"^GatedBottleneck.forward returns a tuple of 3"):
        run(SerialGroup())


@pytest.mark.parametrize(
    ("phase", "wrong", "cure"),
    [
        ("forward", lambda self, x: (x, None), r"write def forward\(self, x, run=None\)"),
        ("backward", lambda self, dy: dy, r"write def backward\(self, dy, ctx\), ctx being what forward has returned"),
    ],
)
def test_passes_that_a_model_can_not_call_are_told(
    phase: str, wrong: Callable[..., Any], cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatedBottleneck, phase, wrong)
    with pytest.raises(PlacementError, match=rf"^bottleneck: GatedBottleneck.{phase}\(self, d?[xy]\) can't be.*{cure}"):
        make_model(make_site(SerialGroup()))


def test_its_gradients_are_those_of_differences() -> None:
    loss, model = run(SerialGroup())
    params = {name: param for name, param in model.named_params() if "bottleneck" in name}
    grads = {name: param.grad.copy() for name, param in params.items() if param.grad is not None}
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 10))
    batch = your_own_layer.Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:])
    for name, param in params.items():
        direction = np.random.default_rng(2).standard_normal(param.data.shape)
        sides = []
        for sign in (1e-5, -2e-5):
            param.data += sign * direction
            sides.append(model.loss_forward(batch)[0])
        param.data += 1e-5 * direction
        assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(np.vdot(grads[name], direction), rel=1e-6)


def test_a_forgotten_sum_is_an_error_that_names_the_place() -> None:
    for said in run_threads(2, complaint):
        assert re.search(r"^bottleneck: .* must be I .* along tp, found P .* \(made by bottleneck\.down\)", said)


def test_other_mistakes_are_named_too() -> None:
    site = make_site(abstract_mesh({"tp": 4}))
    model = make_model(site)
    layer: GatedBottleneck = model["bottleneck"]
    layer.up.copy = Forgotten(site.summation())  # type: ignore[assignment]  (x is handed on, and dx not summed)
    with pytest.raises(PlacementError, match=r"bottleneck\.up: .* must be R .* found I .*a copy along tp"):
        model.types()
    model = make_model(site)
    model["bottleneck"].gate = site.whole(CONFIG.hidden_size, partial=["tp"])
    with pytest.raises(PlacementError, match=r"bottleneck: the gradient of gate is whole along tp.*summed once more"):
        model.types()
    model = make_model(site)
    model["bottleneck"].down = make_model(make_site(abstract_mesh({"tp": 4}, rank=1)))["bottleneck"].down
    with pytest.raises(PlacementError, match=r"bottleneck\.down: .* must be cut as .* 2:4 of 7 .*, found .* 0:2 of 7"):
        model.types()


@pytest.mark.parametrize("left_out", ["gate", "down"])
def test_what_is_left_out_of_its_children_is_named(left_out: str) -> None:
    model = make_model(make_site(abstract_mesh({"tp": 4})))
    layer = model["bottleneck"]
    named = {name: child for name, child in layer.children().items() if name != left_out}
    layer.children = lambda: named
    with pytest.raises(PlacementError, match=f"^bottleneck: {left_out} is not among children"):
        model.types()


def test_the_script_says_what_it_proves() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("PROOF") == 3 and "WRONG" not in done.stdout
    assert "without the sum: bottleneck: " in done.stdout


def test_the_door_is_whole_and_opening_it_starts_nothing() -> None:
    program = "import sys, mpitp.layers as d; [getattr(d, name) for name in d.__all__]; print('mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")
