"""Between the HTTP thread and the engine: jobs come in by a queue, events go out in one batch a step.

`Service.run` is rank 0's main loop: take what has come, compute a step, deliver. With nothing to do it waits for the
queue and lets the other ranks sleep. Doors for the HTTP thread: `submit`, `cancel`; for signals: `drain`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from mpitp.errors import MpitpError, UsageError
from mpitp.infer.blocks import BLOCK, blocks_of
from mpitp.infer.engine import Engine
from mpitp.infer.requests import Request
from mpitp.serve.jobs import Event, Failed, Job, TextListener
from mpitp.serve.step_watch import StepWatch

Batch = list[tuple[Job, int, Event]]


class Refused(MpitpError):
    """A job isn't taken: why, and the HTTP status that says so."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Counts:
    """What has happened since the start, for /metrics."""

    jobs: int = 0
    texts: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0


class Service:
    """`most_texts`: that may be under way or wait; more are refused. `deliver`: hands events to the HTTP thread."""

    def __init__(self, engine: Engine, most_texts: int, deliver: Callable[[Batch], None]) -> None:
        self.engine, self.most_texts, self._deliver = engine, most_texts, deliver
        self.counts = Counts()
        self.draining = False
        self.failure: str | None = None
        self._inbox: SimpleQueue[tuple[str, Job | None]] = SimpleQueue()
        self._jobs: dict[Job, None] = {}
        self._outbox: Batch = []
        self._texts_left = 0
        self._lock = threading.Lock()

    # For the HTTP thread

    @property
    def texts_left(self) -> int:
        """Texts that run or wait."""
        return self._texts_left

    def room_behind(self, prompt_tokens: int) -> int:
        """How many new tokens the whole cache could hold behind a prompt; the last one needs no place."""
        return self.engine.pool.num_blocks * BLOCK - prompt_tokens + 1

    def check(self, prompt_tokens: int, room: int) -> None:
        """Raise UsageError for a text that the whole cache couldn't hold."""
        if blocks_of(prompt_tokens + room - 1) > self.engine.pool.num_blocks:
            raise UsageError(
                f"a prompt of {prompt_tokens} and {room} new tokens don't fit into the cache of "
                f"{self.engine.pool.num_blocks * BLOCK} tokens; ask for fewer"
            )

    def submit(self, job: Job) -> None:
        """Take a job. Raises Refused when the server is ending, or has too much to do."""
        with self._lock:
            if self.failure is not None:
                raise Refused(self.failure, 503)
            if self.draining:
                raise Refused("the server is ending; it takes no new requests", 503)
            if self._texts_left + len(job.specs) > self.most_texts:
                raise Refused(f"the queue is full ({self._texts_left} texts are under way); try again later", 429)
            self._texts_left += len(job.specs)
            self._inbox.put(("take", job))

    def cancel(self, job: Job) -> None:
        """The client has left: nothing more is computed for it from the next step on."""
        self._inbox.put(("cancel", job))

    def drain(self) -> None:
        """Finish what has been taken, then end `run`. May be called by a signal's handler."""
        self.draining = True
        self._inbox.put(("wake", None))

    def fail(self, message: str) -> None:
        """Tell all clients that nothing more will come. From any thread; the engine may be stuck."""
        self.failure = message
        with self._lock:
            jobs = list(self._jobs)
        self._deliver([(job, 0, Failed(message, 503)) for job in jobs])

    # The engine's thread

    def run(self, watch: StepWatch | None = None) -> None:
        """Serve until `drain` has been called and all texts have ended; the engine goes on to be the caller's. `watch`:
        over its steps.
        """
        try:
            while self._take_all(watch):
                started = time.perf_counter()
                if watch is not None:
                    watch.begin()
                if self.engine.step():
                    self.counts.steps += 1
                    self.counts.step_seconds += time.perf_counter() - started
                    self.counts.new_tokens += len(self.engine.told)
                self._flush()
        except BaseException as error:
            self.fail(f"the engine has failed: {type(error).__name__}")
            raise

    def _take_all(self, watch: StepWatch | None) -> bool:
        """Do what has come; sleep while there is nothing to compute. False: it is over."""
        told_rest = False
        while True:
            has_work = bool(self.engine.running or self.engine.waiting)
            if self._inbox.empty():
                if has_work:
                    return True
                self._flush()
                if self._is_over():
                    return False
                if not told_rest:
                    self.engine.tell_rest()
                    told_rest = True
                if watch is not None:
                    watch.rest()
            what, job = self._inbox.get()
            if job is not None:
                (self._take if what == "take" else self._cancel)(job)

    def _is_over(self) -> bool:
        with self._lock:  # whoever submits has been counted by now, or will see that it is over
            return self.draining and not self._texts_left

    def _take(self, job: Job) -> None:
        with self._lock:
            self._jobs[job] = None
        self.counts.jobs += 1
        first: int | None = None
        for index, spec in enumerate(job.specs):
            tell, ended = partial(self._tell, job, index), partial(self._text_ended, job)
            listener = TextListener(spec, tell, ended)
            request = Request(
                *(spec.prompt, spec.room, listener, spec.sampling, spec.ends, spec.occurrence, spec.num_best),
                grammar=spec.grammar,
                after=first if spec.sibling else None,
            )
            job.numbers.append(self.engine.submit(request))
            first = first if spec.sibling else job.numbers[-1]
            self.counts.texts += 1
            self.counts.prompt_tokens += len(spec.prompt)

    def _cancel(self, job: Job) -> None:
        if job in self._jobs:
            self.counts.cancelled += 1
            for number in job.numbers:
                self.engine.cancel(number)
            self._forget(job)

    def _tell(self, job: Job, index: int, event: Event) -> None:
        self._outbox.append((job, index, event))

    def _text_ended(self, job: Job) -> None:
        job.left -= 1
        with self._lock:
            self._texts_left -= 1
        if not job.left:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        with self._lock:
            self._texts_left -= job.left
            job.left = 0
            self._jobs.pop(job, None)

    def _flush(self) -> None:
        if self._outbox:
            self._deliver(self._outbox)
            self._outbox = []
