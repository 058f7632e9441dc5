"""Vectors of texts on demand: requests come by a queue, all ranks embed what has come together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.infer.embed import embed
from mpitp.infer.orders import WAKE_TAG
from mpitp.models.encoder import Encoder
from mpitp.serve.jobs import Failed
from mpitp.serve.service import Refused
from mpitp.serve.step_watch import StepWatch

MOST_TOGETHER = 64  # requests


@dataclass(slots=True, eq=False)
class VectorJob:
    """Texts of token ids, whose vectors [n, h] come to `events` (or a failure does)."""

    texts: Sequence[Sequence[int]]
    events: asyncio.Queue[tuple[int, Any]] = field(default_factory=asyncio.Queue)


class VectorService:
    """Rank 0's side, and `follow` for the others. `deliver`: hands results to the HTTP thread."""

    def __init__(self, model: Encoder, world: Group, pool: str, most_jobs: int, deliver: Callable[[Any], None]) -> None:
        self.model, self.world, self.pool = model, world, pool
        self.draining = False
        self.failure: str | None = None
        self._most_jobs, self._deliver = most_jobs, deliver
        self._inbox: SimpleQueue[VectorJob | None] = SimpleQueue()
        self._jobs: dict[VectorJob, None] = {}
        self._lock = threading.Lock()

    def submit(self, job: VectorJob) -> None:
        """Take a job. Raises Refused when the server is ending, or has too much to do."""
        with self._lock:
            if self.failure is not None or self.draining:
                raise Refused(self.failure or "the server is ending; it takes no new requests", 503)
            if len(self._jobs) >= self._most_jobs:
                raise Refused(f"the queue is full ({len(self._jobs)} requests wait); try again later", 429)
            self._jobs[job] = None
            self._inbox.put(job)

    def drain(self) -> None:
        """Finish what has been taken, then end `run`. May be called by a signal's handler."""
        self.draining = True
        self._inbox.put(None)

    def fail(self, message: str) -> None:
        """Tell all clients that nothing more will come."""
        self.failure = message
        self._deliver([(job, 0, Failed(message, 503)) for job in list(self._jobs)])

    def run(self, watch: StepWatch) -> None:
        """On rank 0: embed what comes, until `drain` has been called and nothing is left."""
        try:
            while not (self.draining and self._inbox.empty()):
                jobs = self._next_jobs()
                if jobs:
                    watch.begin()
                    vectors = self._embed([text for job in jobs for text in job.texts])
                    watch.rest()
                    ends = np.cumsum([len(job.texts) for job in jobs])[:-1]
                    self._deliver([(job, 0, own) for job, own in zip(jobs, np.split(vectors, ends), strict=True)])
                    with self._lock:
                        for job in jobs:
                            del self._jobs[job]
            self._tell(None)
        except BaseException as error:
            self.fail(f"the server has failed: {type(error).__name__}")
            raise

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

    def _next_jobs(self) -> list[VectorJob]:
        """All that has come, at least something; None in the queue is nothing but a wake-up."""
        found = [self._inbox.get()]
        while len(found) < MOST_TOGETHER:
            try:
                found.append(self._inbox.get_nowait())
            except Empty:
                break
        return [job for job in found if job is not None]

    def _embed(self, texts: list[Sequence[int]]) -> np.ndarray:
        self._tell(texts)
        return embed(self.model, texts, self.pool)

    def _tell(self, texts: list[Sequence[int]] | None) -> None:
        if self.world.size > 1:
            for rank in range(1, self.world.size):
                self.world.send(np.zeros(1, np.int64), rank, WAKE_TAG)
            self.world.broadcast_object(texts)
