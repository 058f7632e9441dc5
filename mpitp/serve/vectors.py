"""Vectors of texts on demand: requests come by a queue, all ranks embed what has come together.

A large request is embedded in pieces, in turn with the others, so that none waits for another one's end and no step
takes long.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.infer.embed import embed
from mpitp.infer.orders import WAKE_TAG
from mpitp.models.encoder import Encoder
from mpitp.serve.jobs import Failed
from mpitp.serve.service import Refused
from mpitp.serve.step_watch import StepWatch

PIECE_TOKENS = 1 << 14  # embedded in a step, at least one text


@dataclass(slots=True, eq=False)
class VectorJob:
    """Texts of token ids, whose vectors [n, h] come to `events` (or a failure does). `vectors`: those made so far."""

    texts: Sequence[Sequence[int]]
    events: asyncio.Queue[tuple[int, Any]] = field(default_factory=asyncio.Queue)
    vectors: list[np.ndarray] = field(default_factory=list)


@dataclass(slots=True)
class VectorCounts:
    """What has happened since the start, for /metrics."""

    jobs: int = 0
    texts: int = 0
    tokens: int = 0
    cancelled: int = 0
    steps: int = 0
    step_seconds: float = 0.0


class VectorService:
    """Rank 0's side, and `follow` for the others. `deliver`: hands results to the HTTP thread."""

    def __init__(self, model: Encoder, world: Group, pool: str, most_jobs: int, deliver: Callable[[Any], None]) -> None:
        self.model, self.world, self.pool = model, world, pool
        self.counts = VectorCounts()
        self.draining = False
        self.failure: str | None = None
        self._most_jobs, self._deliver = most_jobs, deliver
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._jobs: dict[VectorJob, None] = {}  # by turns: who was served last comes last
        self._lock = threading.Lock()

    @property
    def jobs_left(self) -> int:
        """Requests that are answered or wait."""
        return len(self._jobs)

    def submit(self, job: VectorJob) -> None:
        """Take a job. Raises Refused when the server is ending, or has too much to do."""
        with self._lock:
            if self.failure is not None or self.draining:
                raise Refused(self.failure or "the server is ending; it takes no new requests", 503)
            if len(self._jobs) >= self._most_jobs:
                raise Refused(f"the queue is full ({len(self._jobs)} requests wait); try again later", 429)
            self._jobs[job] = None
            self.counts.jobs += 1
            self.counts.texts += len(job.texts)
        self._wakes.put(None)

    def cancel(self, job: VectorJob) -> None:
        """The client has left: nothing more is computed for it from the next step on. Whole ones are let be."""
        with self._lock:
            if job in self._jobs:
                del self._jobs[job]
                self.counts.cancelled += 1
        self._wakes.put(None)

    def drain(self) -> None:
        """Finish what has been taken, then end `run`. May be called by a signal's handler."""
        self.draining = True
        self._wakes.put(None)

    def fail(self, message: str) -> None:
        """Tell all clients that nothing more will come."""
        self.failure = message
        with self._lock:
            jobs = list(self._jobs)
        self._deliver([(job, 0, Failed(message, 503)) for job in jobs])

    def run(self, watch: StepWatch) -> None:
        """On rank 0: embed what comes, until `drain` has been called and nothing is left."""
        try:
            while (pieces := self._next_pieces()) is not None:
                if not pieces:
                    self._wakes.get()
                    continue
                started = time.perf_counter()
                watch.begin()
                vectors = self._embed([text for _, texts in pieces for text in texts])
                watch.rest()
                self.counts.steps += 1
                self.counts.step_seconds += time.perf_counter() - started
                self._hand_out(pieces, vectors)
            self._tell(None)
        except BaseException as error:
            self.fail(f"the server has failed: {type(error).__name__}")
            raise

    def _next_pieces(self) -> list[tuple[VectorJob, Sequence[Sequence[int]]]] | None:
        """Which texts of which jobs come next: an equal share of the tokens of a step for each job, and at least a text
        of the first. None: it is over.
        """
        with self._lock:
            jobs = list(self._jobs)
            if not jobs:
                return None if self.draining else []
        pieces: list[tuple[VectorJob, Sequence[Sequence[int]]]] = []
        room = PIECE_TOKENS
        for place, job in enumerate(jobs):
            texts = _fitting(job.texts[len(job.vectors) :], room // (len(jobs) - place), at_least=not pieces)
            room -= sum(map(len, texts))
            pieces += [(job, texts)] if texts else []
        return pieces

    def _hand_out(self, pieces: Sequence[tuple[VectorJob, Sequence[Sequence[int]]]], vectors: np.ndarray) -> None:
        """Vectors to their jobs; those that have all get them, the others wait for their next turn."""
        start, whole = 0, []
        for job, texts in pieces:
            job.vectors += list(vectors[start : start + len(texts)])
            start += len(texts)
            self.counts.tokens += sum(map(len, texts))
            with self._lock:
                if job in self._jobs:  # else its client has left
                    del self._jobs[job]
                    if len(job.vectors) == len(job.texts):
                        whole.append((job, 0, np.stack(job.vectors)))
                    else:
                        self._jobs[job] = None
        self._deliver(whole)

    def follow(self, watch: StepWatch) -> None:
        """On the other ranks: embed along, and sleep between."""
        while True:
            self.world.wait_for(0, WAKE_TAG)
            self.world.recv(np.zeros(1, np.int64), 0, WAKE_TAG)
            watch.begin()
            texts = self.world.broadcast_object(None)
            if texts is None:
                return
            embed(self.model, texts, self.pool)
            watch.rest()

    def _embed(self, texts: list[Sequence[int]]) -> np.ndarray:
        self._tell(texts)
        return embed(self.model, texts, self.pool)

    def _tell(self, texts: list[Sequence[int]] | None) -> None:
        if self.world.size > 1:
            for rank in range(1, self.world.size):
                self.world.send(np.zeros(1, np.int64), rank, WAKE_TAG)
            self.world.broadcast_object(texts)


def _fitting(texts: Sequence[Sequence[int]], tokens: int, *, at_least: bool) -> Sequence[Sequence[int]]:
    """The first of these texts that have at most so many tokens together. `at_least`: one in any case."""
    count = 0
    for text in texts:
        tokens -= len(text)
        if tokens < 0 and (count or not at_least):
            break
        count += 1
    return texts[:count]
