"""Random configurations: every layout equals the one-rank model, and the invariant mode is equal to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.layouts import Case, check, equals_one_rank, is_invariant

# In CI the same examples every time, so that a red run is red again; elsewhere new ones.
bounded = settings(
    max_examples=80,
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def cases(draw: st.DrawFn, least_head_dim: int = 1) -> Case:
    """Shrinks towards few ranks, small sizes, no dropout."""
    family = draw(st.sampled_from(["gpt2", "llama"]))
    kv_heads, group_size = draw(st.integers(1, 6)), draw(st.integers(1, 4)) if family == "llama" else 1
    ffn, vocab = draw(st.integers(1, 20)), draw(st.integers(2, 40))
    ranks = draw(st.integers(1, 6))
    weights = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).map(tuple)
    return Case(
        family=family,
        ranks=ranks,
        blocks=draw(st.integers(1, min(kv_heads * group_size, ffn, vocab))),
        kv_heads=kv_heads,
        group_size=group_size,
        head_dim=draw(st.integers(least_head_dim, 5)),
        hidden=draw(st.integers(1, 20)),
        ffn=ffn,
        vocab=vocab,
        layers=draw(st.integers(1, 2)),
        lengths=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))),
        biases=draw(st.booleans()),
        tied=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        weights=draw(st.just(()) | weights),
    )


@bounded
@given(cases())
def test_every_layout_equals_one_rank(case: Case) -> None:
    check(equals_one_rank, case)


@bounded
@given(cases(least_head_dim=2))  # 1 is refused
def test_invariant_mode_is_equal_to_the_bit(case: Case) -> None:
    check(is_invariant, case)


TINY = Case("llama", 2, 1, 1, 2, 1, 1, 1, 2, 1, (1,), False, False, 0.0)


def test_failure_prints_a_command_that_shows_it_again() -> None:
    """The note's command is run as it stands, but for the fault, which only this process has."""

    def wrong(case: Case) -> None:
        raise AssertionError("wrong")

    wrong.__name__ = "equals_one_rank"
    with pytest.raises(AssertionError, match="wrong") as caught:
        check(wrong, TINY)
    (note,) = caught.value.__notes__
    command = note.removeprefix("to see it again: ")
    assert "equals_one_rank(Case(family='llama', ranks=2," in command
    root, folder = Path(__file__).resolve().parents[2], Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_wrong_layouts_are_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: with a forgotten sum over replicated KV heads, the smallest case that has one is found."""
    from mpitp.layers.attention import KvReplicas

    def forget(self: KvReplicas, slots: object, dk: object, dv: object) -> None:
        local = lambda partials, like: sum(partials[1:], start=partials[0]) if partials else like  # noqa: E731
        original(replace(self, summation=local), slots, dk, dv)

    original = KvReplicas.collect
    monkeypatch.setattr(KvReplicas, "collect", forget)

    @settings(bounded, derandomize=True)
    @given(cases())
    def find(case: Case) -> None:
        check(equals_one_rank, case)

    with pytest.raises(BaseException) as caught:
        find()
    notes = " ".join(caught.value.__notes__)
    assert "to see it again" in notes and "Case(family='llama', ranks=2, " in notes
