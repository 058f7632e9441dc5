"""Rows on their way over ep: seconds by hand, what hides them, and over which ranks experts' gradients are summed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.plan.anatomy import Held
from mpitp.plan.auto import with_layout
from mpitp.plan.cost import Step, cost_of, spans_of_replicas
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine
from mpitp.plan.run_file_edit import edit_run_file
from mpitp.plan.sums import Span
from mpitp.plan.trips import Beside, _hidden
from tests.plan.cases import anatomy_of, machine, run_of

ROWS = 2 * 16 * 2 * 48 * 4  # bytes: sequences, tokens, experts of each, elements
MIXTURES = 3  # of the four blocks


def overlapping(overlap: float) -> Machine:
    """Nodes of two ranks, whose transfers move on behind products."""
    found = machine()
    wide = found.between_nodes
    assert wide is not None
    small = replace(found.machine, ranks_per_node=2)
    level = replace(found.in_node, overlap=overlap)
    return replace(found, machine=small, in_node=level, between_nodes=replace(wide, overlap=overlap))


def test_an_exchange_is_a_message_to_every_other_rank() -> None:
    on = overlapping(0.0)
    wide = on.between_nodes
    assert wide is not None
    near, far = on.in_node.send_seconds(1000), wide.send_seconds(1000 * max(1, 2 / wide.links))
    assert on.all_to_all_seconds(4000, 4) == pytest.approx(3 * near)
    assert on.all_to_all_seconds(4000, 2, 2) == pytest.approx(near + 2 * far)


def test_rows_go_there_and_home_forward_and_backward() -> None:
    """24 sequences in twos, dealt to two ranks, through three mixtures: six microbatches of four ways each."""
    on = overlapping(0.0)
    cost = cost_of(anatomy_of(run_of("moe", {}), on), Step(24), Layout(ep=2, micro=2))
    way, said = on.all_to_all_seconds(ROWS, 2), on.all_to_all_seconds(5 * 8, 2)
    assert cost.parts["exchange over ep"] == pytest.approx(6 * MIXTURES * (4 * way + said))
    assert "exchange over ep" not in cost.hidden
    again = cost_of(anatomy_of(run_of("moe", {}), on), Step(24), Layout(ep=2, micro=2, recompute="full"))
    assert again.parts["exchange over ep"] == pytest.approx(6 * MIXTURES * (6 * way + 2 * said))


@pytest.mark.parametrize("ep", [2, 4])
def test_what_is_hidden_is_not_waited_for(ep: int) -> None:
    layout = Layout(ep=ep, micro=2)
    plain, behind = (cost_of(anatomy_of(run_of("moe", {}), overlapping(part)), Step(24), layout) for part in (0.0, 0.5))
    hidden = behind.hidden["exchange over ep"]
    assert 0 < hidden <= 0.5 * plain.parts["exchange over ep"]
    assert behind.parts["exchange over ep"] + hidden == pytest.approx(plain.parts["exchange over ep"])


def test_what_rows_travel_behind() -> None:
    """In a node the shared expert, and down's gradient; between nodes the experts' own work on the other leg too."""
    beside = Beside(shared=(1.0, 2.0), experts=(4.0, 6.0), down=1.5)
    assert _hidden(10.0, 1, beside, FORWARD, 10.0) == 1.0
    assert _hidden(10.0, 1, beside, BACKWARD, 10.0) == 2.0 + 1.5
    assert _hidden(10.0, 2, beside, FORWARD, 10.0) == (1.0 + 2.0) + 2.0
    assert _hidden(10.0, 2, beside, BACKWARD, 10.0) == (2.0 + 3.0) + (3.0 + 1.5)
    assert _hidden(10.0, 2, beside, BACKWARD, 0.5) == 1.0
    assert _hidden(1.0, 2, beside, FORWARD, 1.0) == 1.0 + 0.5  # nothing is left to hide the last leg's way back


def test_experts_are_summed_over_the_ranks_that_have_the_same_ones() -> None:
    assert spans_of_replicas(Layout(dp=2, tp=2, ep=2), 4) == [Span(2, 2), Span(1, 2)]
    assert spans_of_replicas(Layout(dp=2, cp=2, ep=2), 2) == [Span(2, 4), Span(2, 2)]
    assert spans_of_replicas(Layout(dp=4), 2) == [Span(2, 2)]
    on, config = overlapping(0.0), run_of("moe", {})
    anatomy = anatomy_of(config, on)
    table = anatomy.weights(1, 0, 4, 4)
    dealt = float(table[:, Held.DEALT_WIDE].sum())
    assert dealt == MIXTURES * 2 * 3 * 40 * 48 * 4  # two of the five experts: gate, up, down
    dense = float(table[:, Held.WIDE].sum() - table[0, Held.WIDE]) - dealt  # the tied table once
    cost = cost_of(anatomy, Step(24, 1 << 30), Layout(ep=4, micro=2))
    assert cost.parts["sums over replicas"] == pytest.approx(on.sum_seconds(dense, 2, 2))
    apart = cost_of(anatomy, Step(24, 1 << 30), Layout(dp=2, ep=2, micro=2)).parts["sums over replicas"]
    table = anatomy.weights(1, 0, 4, 2)
    dealt = float(table[:, Held.DEALT_WIDE].sum())
    assert apart == pytest.approx(on.sum_seconds(dense, 2, 2) + on.sum_seconds(dealt, 1, 2))


def test_ep_is_written_and_an_earlier_one_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[mesh]\nep = 3\ntp = 2\n", encoding="utf-8")
    edit_run_file(path, {"mesh": Layout(ep=4).keys()["mesh"]})
    assert "ep = 4\n" in path.read_text(encoding="utf-8")
    edit_run_file(path, {"mesh": Layout(dp=4).keys()["mesh"]})
    assert "ep" not in path.read_text(encoding="utf-8").replace("sequence_parallel", "")
    run = with_layout(run_of("moe", {}), Layout(ep=4))
    assert run.mesh.ep == 4 and with_layout(run, Layout(dp=4)).mesh.ep == 1
