"""The benchmark of pipeline schedules, on thread ranks."""

from __future__ import annotations

import pytest

from mpitp.bench import pipeline
from mpitp.comm import SerialGroup, run_threads
from mpitp.errors import UsageError
from tests.bench.test_command import parsed

SMALL = ["pipeline", "--layers", "2", "--hidden", "8", "--heads", "2", "--vocab", "16", "--seq", "4", "--rounds", "2"]


def test_schedules_are_timed_beside_one_rank() -> None:
    args = parsed(*SMALL, "--microbatches", "3", "--schedules", "gpipe", "1f1b", "zb")
    facts = run_threads(2, lambda group: pipeline.measure(args, group))
    assert facts[0]["schedules"] == facts[1]["schedules"]
    for name, bubble in (("gpipe", 1 / 4), ("1f1b", 1 / 4), ("zb", 1 / 10)):
        found = facts[0]["schedules"][name]
        ideal = facts[0]["one_rank_seconds"]["least"] / 2 / (1 - bubble)
        assert found["bubble"] == pytest.approx(bubble)
        assert found["of_what_the_bubble_allows"]["least"] == pytest.approx(ideal / found["seconds"]["least"])
    assert any(line.startswith("zb ") for line in pipeline.report(facts[0]))


def test_one_rank_is_no_pipeline() -> None:
    with pytest.raises(UsageError, match="this is a job of 1 rank"):
        pipeline.measure(parsed(*SMALL), SerialGroup())
