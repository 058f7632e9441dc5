"""What is to be said of a schedule: its idle time, what it holds, what limits it, and how the others would do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.pipeline.schedules import SCHEDULES, make_schedule
from mpitp.pipeline.simulate import Durations, Timeline, simulate

MOST_ACTIONS = 200_000  # of a chart; more can neither be seen nor drawn in a few seconds
GOOD_SHARE = 0.1  # of idle time: what is aimed at where more microbatches are proposed

Sizes = tuple[int, int, int]  # stages, microbatches, chunks a stage


@dataclass(frozen=True, slots=True)
class Report:
    """A schedule's timeline and what follows from it."""

    schedule: str
    sizes: Sizes
    durations: Durations
    timeline: Timeline
    limit: str
    others: dict[str, float]  # the bubble's share of the other schedules of one chunk a stage

    def as_dict(self) -> dict[str, Any]:
        """For programs: every action too."""
        stages, microbatches, chunks = self.sizes
        return {
            "schedule": self.schedule, "stages": stages, "microbatches": microbatches, "chunks": chunks,
            "times": asdict(self.durations), "length": self.timeline.length, "bubble": self.timeline.bubble,
            "in_flight": self.timeline.in_flight, "limit": self.limit, "bubble_of_others": self.others,
            "actions": [
                {
                    "stage": timed.stage, "kind": timed.action.kind.name.lower(),
                    "microbatch": timed.action.microbatch, "chunk": timed.action.chunk,
                    "start": timed.start, "stop": timed.stop,
                }
                for own in self.timeline.timed for timed in own
            ],
        }  # fmt: skip


def make_report(schedule: str, sizes: Sizes, durations: Durations) -> Report:
    """Simulate the schedule. Raises ConfigError for numbers that there is no schedule of, or too many to draw."""
    _check_size(sizes)
    timeline = simulate(make_schedule(schedule, *sizes), durations)
    others = {
        name: simulate(make_schedule(name, *sizes[:2]), durations).bubble
        for name in SCHEDULES
        if name not in (schedule, "interleaved")
    }
    return Report(schedule, sizes, durations, timeline, _limit(schedule, sizes, durations), others)


def words_of(report: Report) -> list[str]:
    """A few lines for people."""
    stages, microbatches, chunks = report.sizes
    cut = f" of {chunks} chunks each" if chunks > 1 else ""
    unit = f" (of a chunk: 1/{chunks} of a stage's)" if chunks > 1 else ""
    held = " ".join(str(count) for count in report.timeline.in_flight)
    others = ", ".join(f"{name} {share:.1%}" for name, share in report.others.items())
    return [
        f"{report.schedule}: {stages} stages{cut}, {microbatches} microbatches; step {report.timeline.length:g} long",
        f"bubble: {report.timeline.bubble:.1%} of the stages' time is idle ({others})",
        f"activations in flight, at most, stage 0 to {stages - 1}: {held}{unit}",
        f"limit: {report.limit}",
    ]


def _limit(schedule: str, sizes: Sizes, durations: Durations) -> str:
    """What keeps the stages from being busy all the time, and what would help."""
    stages, microbatches, _ = sizes
    actions = make_schedule(schedule, *sizes)
    quick = simulate(actions, replace(durations, send=0.0)).length
    idle = quick - microbatches * durations.total
    waited = simulate(actions, durations).length - quick
    if waited > idle:
        return f"messages: waiting for them takes {waited:g}, filling and draining the pipeline {idle:g}"
    if stages == 1:
        return "none: one stage is never idle"
    if microbatches < stages:
        return f"{microbatches} microbatches never fill {stages} stages; {stages} or more do"
    enough = _enough(idle / durations.total, stages if schedule == "interleaved" else 1)
    messages = f" (beside {waited:g} for messages)" if waited > 0 else ""
    start = f"the pipeline fills and drains in {idle:g} of {quick:g}{messages}, no more with more microbatches"
    return start if microbatches >= enough else f"{start}: from {enough} on that is {GOOD_SHARE:.0%} or less"


def _enough(idle_microbatches: float, multiple: int) -> int:
    """Microbatches (a multiple) with which the idle time, as long as so many of them, is at most GOOD_SHARE.

    idle / (m + idle) <= share where m >= idle (1 - share) / share.
    """
    least = idle_microbatches * (1 - GOOD_SHARE) / GOOD_SHARE
    return multiple * math.ceil(least / multiple - 1e-9)


def _check_size(sizes: Sizes) -> None:
    stages, microbatches, chunks = sizes
    count = 3 * stages * microbatches * chunks
    if min(sizes) > 0 and count > MOST_ACTIONS:
        raise ConfigError(
            f"{stages} stages x {microbatches} microbatches x {chunks} chunks x 3 = {count:,} actions, more than the "
            f"{MOST_ACTIONS:,} that a chart can show; plan with fewer microbatches"
        )
