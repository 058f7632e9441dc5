"""Simulated ranks: folded as unfolded, the cost's own seconds where nobody waits, shared links, slow and dead ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpitp.errors import ConfigError
from mpitp.models.registry import config_from_hf
from mpitp.plan.cost import Step, cost_of
from mpitp.plan.events import Meet, Send, Simulation, Take, Work
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine
from mpitp.plan.simulate import Recovery, StepSimulator, Troubles, simulate_job
from mpitp.plan.symmetry import Places, classes_of
from tests.plan.cases import anatomy_of, machine, run_of
from tests.plan.published import step_seconds, v100

STEP = Step(24)


def simulator(layout: Layout, per_node: int = 16, kind: str = "llama") -> StepSimulator:
    return StepSimulator(anatomy_of(run_of(kind, {}), on_nodes(per_node)), STEP, replace(layout, micro=2))


def on_nodes(per_node: int) -> Machine:
    found = machine()
    return replace(found, machine=replace(found.machine, ranks_per_node=per_node))


LAYOUTS = [
    Layout(tp=4),
    Layout(dp=5, zero=1),
    Layout(pp=4, dp=2, schedule="zb"),
    Layout(pp=2, tp=2, dp=3, recompute="full"),
    Layout(pp=2, tp=4, dp=2, schedule="interleaved", chunks=2),
    Layout(cp=2, dp=2, tp=3),
]
TROUBLES = [Troubles(), Troubles({3: 2.0}), Troubles({1: 1.5, 2: 1.5}), Troubles(dies={1: 0.01})]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("per_node", [2, 3, 8])
def test_folded_ranks_do_what_all_ranks_do(layout: Layout, per_node: int) -> None:
    """Every rank ends at the moment at which its class does, on nodes that cut groups in any way."""
    steps = simulator(layout, per_node)
    for troubles in TROUBLES:
        folded, whole = steps.run(troubles), steps.run(troubles, fold=False)
        of = folded.classes.of
        assert [folded.outcome.stop[of[rank]] for rank in range(layout.ranks)] == pytest.approx(whole.outcome.stop)
        for rank, spent in enumerate(whole.outcome.spent):
            assert folded.outcome.spent[of[rank]] == pytest.approx(spent)
        assert sum(folded.classes.count) == layout.ranks


def test_thousands_of_ranks_are_a_few_classes() -> None:
    """One slow rank sets apart its replica and its node, and not the thousands of others."""
    steps = StepSimulator(anatomy_of(run_of("llama", {}), on_nodes(8)), Step(2048), Layout(pp=4, dp=256, tp=4))
    plain, slow = steps.run(), steps.run(Troubles({5: 3.0}))
    assert len(plain.classes.first) == 4
    assert 4 < len(slow.classes.first) <= 48
    assert slow.seconds > 1.2 * plain.seconds


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS], ids=str)
def test_without_sharing_a_step_takes_its_cost(layout: Layout) -> None:
    """On one node nobody shares a link: the sum of the parts, and the gradient norm's latency. The cost takes a stage's
    chunks as equal, which they aren't here.
    """
    steps = simulator(layout)
    cost = cost_of(steps.anatomy, STEP, steps.layout)
    assert steps.run().seconds == pytest.approx(cost.seconds, rel=5e-3 if layout.chunks > 1 else 2e-3)


def test_the_slowest_rank_of_all_replicas_sets_the_pace() -> None:
    plain, slow = (simulator(Layout(dp=4)).run(troubles) for troubles in (Troubles(), Troubles({2: 2.0})))
    assert slow.seconds == pytest.approx(2 * plain.seconds, rel=0.05)
    waits = [spent.get(("wait", "sums over replicas"), 0.0) for spent in slow.outcome.spent]
    assert min(waits) == 0.0 and max(waits) == pytest.approx(0.5 * slow.seconds, rel=0.1)


MIXTURES = [Layout(ep=5), Layout(ep=2, dp=3), Layout(ep=2, pp=2, tp=2), Layout(ep=3, cp=2, zero=1)]
UNEVEN = [Layout(ep=5, dp=2), Layout(dp=5, zero=3), Layout(dp=5, zero=2)]


@pytest.mark.parametrize("layout", MIXTURES, ids=str)
def test_exchanges_of_rows_take_their_cost_where_nobody_shares_a_link(layout: Layout) -> None:
    """Microbatches that all ranks have as many of."""
    steps = StepSimulator(anatomy_of(run_of("moe", {}), on_nodes(16)), Step(60), replace(layout, micro=2))
    cost = cost_of(steps.anatomy, Step(60), steps.layout)
    found = steps.run()
    assert found.seconds == pytest.approx(cost.seconds, rel=2e-3)
    told = found.mean_spent()["transfer", "exchange over ep"]
    assert told == pytest.approx(cost.parts["exchange over ep"], rel=1e-6 if layout.pp == 1 else 0.3)


@pytest.mark.parametrize("layout", [*MIXTURES, *UNEVEN], ids=str)
@pytest.mark.parametrize("per_node", [2, 4])
def test_folded_ranks_of_a_mixture_do_what_all_ranks_do(layout: Layout, per_node: int) -> None:
    """Those with fewer microbatches go along in the others' exchanges, and nobody waits for ever."""
    steps = simulator(layout, per_node, "moe" if layout.ep > 1 else "llama")
    for troubles in TROUBLES[:2]:
        folded, whole = steps.run(troubles), steps.run(troubles, fold=False)
        of = folded.classes.of
        assert [folded.outcome.stop[of[rank]] for rank in range(layout.ranks)] == pytest.approx(whole.outcome.stop)
        assert whole.seconds < float("inf") and not whole.outcome.stuck


def test_exchanges_of_a_node_share_its_links() -> None:
    """Two groups of ep on two nodes of two ranks each: with one link they take turns, as the machine's own seconds say;
    with two links neither waits for the other.
    """
    found = on_nodes(2)
    wide = found.between_nodes
    assert wide is not None

    def on(links: int) -> StepSimulator:
        machine = replace(found, between_nodes=replace(wide, links=links, overlap=0.0))
        return StepSimulator(anatomy_of(run_of("moe", {}), machine), Step(24), Layout(ep=2, tp=2, micro=2))

    spent = {}
    for links in (1, 2):
        steps = on(links)
        cost = cost_of(steps.anatomy, Step(24), steps.layout)
        spent[links] = steps.run().mean_spent()["transfer", "exchange over ep"]
        assert spent[links] == pytest.approx(cost.parts["exchange over ep"], rel=1e-6)
    assert spent[1] > 1.1 * spent[2]


def engine(places: Places, work: list[object], groups: dict[str, tuple[str, ...]], capacity: int = 1) -> Simulation:
    classes = classes_of(places, work, list(groups.values()), fold=False)  # type: ignore[arg-type]
    return Simulation(places, classes, groups, capacity, keeps_stays=True)


def test_transfers_share_a_link_and_go_on_alone() -> None:
    """Two pairs of ranks on two nodes, one link: a transfer of 4 s beside one of 1 s that comes after 1 s.

    Alone until 1, both at half speed until 3 (the short one is done), and the last 2 s alone: until 5.
    """
    places = Places({"dp": 2, "tp": 2}, 2)
    groups = {"dp": ("dp",)}
    long, short = [Meet("dp", 0.0, 4.0, "long")], [Work(1.0, "w"), Meet("dp", 0.0, 1.0, "short")]
    assert engine(places, [0, 1, 0, 1], groups).run([long, short, long, short]).stop == [5.0, 3.0, 5.0, 3.0]
    assert engine(places, [0, 1, 0, 1], groups, 2).run([long, short, long, short]).stop == [4.0, 2.0, 4.0, 2.0]
    in_node = Places({"dp": 2, "tp": 2}, 4)
    assert engine(in_node, [0, 1, 0, 1], groups).run([long, short, long, short]).stop == [4.0, 2.0, 4.0, 2.0]


def test_messages_are_waited_for_and_a_dead_rank_stops_those_who_need_it() -> None:
    places = Places({"pp": 2}, 1)
    sender = [Work(2.0, "w"), Send(1, 7, 0.5, "m"), Work(1.0, "w")]
    taker = [Take(-1, 7, "m"), Work(1.0, "w")]
    found = engine(places, [0, 1], {}).run([sender, taker])
    assert found.stop == [3.0, 3.5]
    assert found.spent[1] == {("wait", "m"): 2.5, ("work", "w"): 1.0}
    broken = engine(places, [0, 1], {}).run([sender, taker], {0: 1.5})
    assert broken.stuck == {0: "w", 1: "m"} and broken.length == float("inf")


def test_a_job_goes_on_from_its_checkpoint() -> None:
    """Ten steps, saved every four: a death in step 6 costs steps 4 and 5, its own beginning, and the restart."""
    steps = simulator(Layout(pp=2, dp=2))
    one = steps.run().seconds
    recovery = Recovery(4, one / 2, notice_seconds=1.0, restart_seconds=5.0)
    moment = 4 * one + one / 2 + 2.5 * one
    job = simulate_job(steps, 10, Troubles(dies={1: moment}), recovery)
    assert (job.died_in, job.redone) == (6, 2)
    assert job.undisturbed == pytest.approx(11 * one)
    assert 0 < job.standstill <= one
    assert job.lost == pytest.approx(job.standstill + 6.0 + 2.5 * one)
    assert simulate_job(steps, 10, Troubles(dies={1: 1e6}), recovery).lost == 0.0
    assert simulate_job(steps, 10, Troubles(), recovery).died_in == -1


def test_bubble_is_the_published_one() -> None:
    """(p-1)/m of the ideal time, and 1/v of it with v chunks (Narayanan et al. 2021, sections 2.2.1 and 2.2.2)."""
    found = v100(1e14)
    links = replace(found.in_node, latency_seconds=0.0, send_bytes_per_second=1e15)
    memory = replace(found.compute, optimizer_bytes_per_second=1e15, passes=((1.0, 1e15),))
    fast = replace(found, in_node=links, compute=memory)
    sizes = {"n_embd": 256, "n_head": 4, "n_layer": 16, "n_positions": 32, "vocab_size": 8}
    decoder = config_from_hf({"model_type": "gpt2", **sizes})

    def seconds(count: int, **keys: object) -> float:
        return step_seconds(fast, decoder, Layout(pp=4, stages=(4,) * 4, **keys), count)  # type: ignore[arg-type]

    pace = seconds(72) - seconds(64)  # of eight microbatches more
    for count in (8, 16, 32):
        ideal = pace * count / 8
        assert seconds(count) / ideal - 1 == pytest.approx(3 / count, rel=0.05)
        folded = step_seconds(fast, decoder, Layout(pp=4, schedule="interleaved", chunks=2, stages=(2,) * 8), count)
        assert folded / ideal - 1 == pytest.approx(3 / count / 2, rel=0.1)


@pytest.mark.parametrize(
    ("troubles", "told"),
    [
        (Troubles({9: 2.0}), "no rank 9 among 4"),
        (Troubles({1: 0.0}), "0 times as slow"),
        (Troubles(dies={1: -1.0}), "-1"),
    ],
)
def test_impossible_troubles_are_told(troubles: Troubles, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        simulator(Layout(dp=4)).run(troubles)
