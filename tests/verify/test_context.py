"""`verify` of sequences that are cut over ranks: rows are put back in order, and faults of such layouts are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, Pending, abstract_mesh, make_mesh, run_threads
from mpitp.errors import ConfigError, PlacementError
from mpitp.layers.build import Builder
from mpitp.layers.heads_keys import Dealt
from mpitp.layers.keys import OWN_KEYS
from mpitp.layers.passes import DropoutState
from mpitp.layers.ring_keys import TAG_GRADIENTS, RingKeys
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch, build_model
from mpitp.ops.online_softmax import join_finished
from mpitp.verify.batches import random_batch
from mpitp.verify.report import summary
from mpitp.verify.run import FiniteDifference, finite_differences
from tests.sharded import fill
from tests.verify.cases import CONFIGS, run_verify

Plant = Callable[[pytest.MonkeyPatch], None]
MESHES = [({"cp": 2}, "ring"), ({"cp": 3}, "heads"), ({"cp": 2, "tp": 2}, "ring"), ({"cp": 2, "tp": 2}, "heads")]


@pytest.mark.parametrize(("mesh", "form"), MESHES, ids=str)
@pytest.mark.parametrize("model", CONFIGS)
def test_without_a_fault_all_is_equal(model: str, mesh: dict[str, int], form: str) -> None:
    ranks = int(np.prod(list(mesh.values())))
    report = run_verify(model, ranks, 1, mesh=mesh, cp_form=form, sequence_parallel="tp" in mesh)
    assert report.ok, summary(report, [], ranks)
    assert len(report.rows) > 50


@pytest.mark.parametrize(("mesh", "form"), [({"cp": 3}, "ring"), ({"cp": 2, "tp": 2}, "heads")], ids=str)
def test_sequences_of_any_length(mesh: dict[str, int], form: str) -> None:
    """Some shorter than the pieces that they are cut into, so that a rank has none of their rows."""
    lengths = (1, 7, 3, 12, 2)
    ids = np.random.default_rng(3).integers(0, 53, sum(lengths) + 1)
    targets = np.where(np.arange(sum(lengths)) % 4 == 1, -1, ids[1:])
    batch = Batch(ids[:-1], Rows.of(lengths), targets, DropoutState(3, 1))
    ranks = int(np.prod(list(mesh.values())))
    report = run_verify("llama", ranks, 1, mesh=mesh, cp_form=form, batch=batch)
    assert report.ok, summary(report, [], ranks)


def test_rows_are_dealt_early_and_late() -> None:
    whole = Rows.of((13, 2))
    parts = [whole.cut(rank, 3) for rank in range(3)]
    assert [[(run.first, run.length) for run in part.runs] for part in parts] == [
        [(0, 3), (11, 2), (0, 1), (2, 0)],
        [(3, 2), (9, 2), (1, 1), (2, 0)],
        [(5, 2), (7, 2), (2, 0), (2, 0)],
    ]
    numbers = np.concatenate([part.numbers_in(whole) for part in parts])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(15))
    assert all(part.uncut() == whole for part in parts)


def test_central_differences() -> None:
    batch = random_batch(CONFIGS["llama"], batch=2, seq=5, seed=1)

    def run(group: Group) -> list[FiniteDifference]:
        model = build_model(CONFIGS["llama"], make_site(make_mesh(group, {"cp": 2}), dtype="float64"))
        fill(model.named_params(), std=0.2)
        return finite_differences(model, batch, 3)

    assert all(check.ok for checks in run_threads(2, run) for check in checks)


def positions_from_0_on_a_piece(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "positions", lambda rows: np.concatenate([np.arange(run.length) for run in rows.runs]))


def loss_divided_by_the_local_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("mpitp.train.step.DATA_AXES", ("dp", "ep"))


def a_hop_of_dk_is_missing(patch: pytest.MonkeyPatch) -> None:
    """What the other ranks' queries add to the gradients of the keys doesn't come home."""
    right, own = RingKeys._start_shift, {}

    def shift(keys: RingKeys, x: Any, count: int, tag: int) -> Pending:
        pending = right(keys, x, count, tag)
        if tag != TAG_GRADIENTS:
            return pending
        if keys not in own:  # the first of two steps
            own[keys] = x.copy()
            return pending
        first = own.pop(keys)
        return Pending(lambda: (pending.wait(), first)[1])

    patch.setattr(RingKeys, "_start_shift", shift)


def softmaxes_of_pieces_added(patch: pytest.MonkeyPatch) -> None:
    def added(o: Any, lse: Any, other_o: Any, other_lse: Any) -> None:
        join_finished(np.zeros_like(o), lse, other_o, other_lse)
        o += other_o

    patch.setattr("mpitp.layers.ring_keys.join_finished", added)


def dropout_by_the_place_in_the_piece(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("mpitp.layers.attention._moved", lambda numbers, by: numbers)


def early_pieces_alone_are_sent(patch: pytest.MonkeyPatch) -> None:
    """The keys of a rank's late piece are taken for those of its early one."""
    right = Rows.places

    def places(rows: Rows) -> Any:
        found = list(right(rows))
        swap = not rows.everyone and len(found) > 1 and found[0][0].sample == found[1][0].sample
        return iter([(found[0][0], found[0][1]), (found[0][0], found[0][1]), *found[2:]] if swap else found)

    patch.setattr(Rows, "places", places)


def a_kv_head_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    right = Dealt.of

    def of(head_map: Any, rank: int, ranks: int) -> Dealt:
        own = right(head_map, rank, ranks)
        return own if rank else replace(own, kv=range(own.kv.start + 1, own.kv.stop + 1))

    patch.setattr(Dealt, "of", of)


FAULTS: list[tuple[Plant, str, str, str, str]] = [  # what, model, form, kind and place of what is seen first
    (positions_from_0_on_a_piece, "gpt2", "ring", "y", "positions"),
    (positions_from_0_on_a_piece, "llama", "ring", "y", "blocks.0.attention.heads"),
    (loss_divided_by_the_local_count, "gpt2", "heads", "value", "loss"),
    (a_hop_of_dk_is_missing, "llama", "ring", "dx", "blocks.1.attention.heads"),
    (softmaxes_of_pieces_added, "gpt2", "ring", "y", "blocks.0.attention.heads"),
    (dropout_by_the_place_in_the_piece, "gpt2", "ring", "y", "blocks.0.attention.heads"),
    (early_pieces_alone_are_sent, "llama", "ring", "y", "blocks.0.attention.heads"),
    (a_kv_head_of_the_neighbour, "llama", "heads", "y", "blocks.0.attention.heads"),
]


@pytest.mark.parametrize(
    ("plant", "model", "form", "kind", "place"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_fault_is_found_and_named(
    plant: Plant, model: str, form: str, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = run_verify(model, 2, int(kind == "value"), mesh={"cp": 2}, cp_form=form)
    first = report.first(kind)
    assert first is not None and first.name == place, summary(report, [], 2)
    if kind != "y":
        assert report.first("y") is None


def test_a_model_that_keeps_its_keys_for_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "keys", lambda build: OWN_KEYS)
    with pytest.raises(PlacementError, match=r"blocks\.0\.attention\.heads: .* found V .* along cp aren't seen"):
        build_model(CONFIGS["llama"], make_site(abstract_mesh({"cp": 2, "tp": 2})).abstract()).types()


@pytest.mark.parametrize("form", ["ring", "heads"])
def test_a_batch_that_is_not_cut_is_refused(form: str) -> None:
    def run(group: Group) -> None:
        model = build_model(CONFIGS["gpt2"], make_site(make_mesh(group, {"cp": 2}), cp_form=form))
        model.forward(random_batch(CONFIGS["gpt2"], batch=1, seq=5, seed=1))

    with pytest.raises(ConfigError, match="needs sequences that are cut over them"):
        run_threads(2, run)


def test_a_sequence_beyond_the_positions_is_refused_on_all_ranks() -> None:
    def run(group: Group) -> str:
        model = build_model(CONFIGS["gpt2"], make_site(make_mesh(group, {"cp": 2})))
        with pytest.raises(ConfigError) as caught:
            model.forward(Batch(np.zeros(25, np.int64), Rows.of((25,))).cut(group.rank, 2))
        return str(caught.value)

    assert all("a sequence of 25 tokens exceeds" in said for said in run_threads(2, run))


def test_the_invariant_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="context parallelism has no invariant mode"):
        make_site(abstract_mesh({"cp": 2}), invariant_blocks=2)
