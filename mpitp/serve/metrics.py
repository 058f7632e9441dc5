"""/metrics: what the engine does and has done, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mpitp.infer.blocks import BLOCK
from mpitp.serve.service import Service
from mpitp.serve.vectors import VectorService

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Reads the numbers when they are asked for, by `read`."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        return self._read()


def metrics_of_texts(service: Service, num_ranks: int) -> Metrics:
    """Of a server that writes texts; `num_ranks` of the model."""
    return Metrics(lambda: _of_texts(service, num_ranks))


def metrics_of_vectors(service: VectorService, num_ranks: int) -> Metrics:
    """Of a server that makes vectors; `num_ranks` of the model."""
    return Metrics(lambda: _of_vectors(service, num_ranks))


def _of_texts(service: Service, num_ranks: int) -> Iterator[Metric]:
    engine, counts = service.engine, service.counts
    total = engine.pool.num_blocks
    yield GaugeMetricFamily("mpitp_ranks", "Ranks that compute", num_ranks)
    yield GaugeMetricFamily("mpitp_texts_running", "Texts that are computed in each step", len(engine.running))
    waiting = max(0, service.texts_left - len(engine.running))
    yield GaugeMetricFamily("mpitp_texts_waiting", "Texts that wait for a place", waiting)
    yield GaugeMetricFamily("mpitp_cache_tokens", "Tokens that the cache has room for", total * BLOCK)
    held = (total - engine.pool.free) * BLOCK
    yield GaugeMetricFamily("mpitp_cache_held_tokens", "Of these, held by running texts", held)
    yield CounterMetricFamily("mpitp_requests", "Requests taken", counts.jobs)
    yield CounterMetricFamily("mpitp_texts", "Texts taken", counts.texts)
    yield CounterMetricFamily("mpitp_cancelled", "Requests whose client left", counts.cancelled)
    yield CounterMetricFamily("mpitp_prompt_tokens", "Tokens of prompts", counts.prompt_tokens)
    yield CounterMetricFamily("mpitp_new_tokens", "Tokens chosen", counts.new_tokens)
    yield CounterMetricFamily("mpitp_computed_tokens", "Rows computed", engine.computed_tokens)
    yield CounterMetricFamily("mpitp_reused_tokens", "Tokens found in the cache", engine.reused_tokens)
    yield CounterMetricFamily("mpitp_text_steps", "Steps times the texts that got tokens in them", engine.chosen_runs)
    yield CounterMetricFamily("mpitp_drafted_tokens", "Tokens tried by speculation", engine.drafted_tokens)
    yield CounterMetricFamily(
        "mpitp_accepted_tokens",
        "Of these, right ones; over mpitp_text_steps, plus 1: tokens of a text a step",
        engine.accepted_tokens,
    )
    yield CounterMetricFamily("mpitp_preemptions", "Texts that had to wait again", engine.preemptions)
    yield CounterMetricFamily("mpitp_steps", "Steps computed", counts.steps)
    yield CounterMetricFamily("mpitp_step_seconds", "Seconds spent in steps", counts.step_seconds)


def _of_vectors(service: VectorService, num_ranks: int) -> Iterator[Metric]:
    counts = service.counts
    yield GaugeMetricFamily("mpitp_ranks", "Ranks that compute", num_ranks)
    yield GaugeMetricFamily("mpitp_requests_left", "Requests that are answered or wait", service.jobs_left)
    yield CounterMetricFamily("mpitp_requests", "Requests taken", counts.jobs)
    yield CounterMetricFamily("mpitp_texts", "Texts taken", counts.texts)
    yield CounterMetricFamily("mpitp_cancelled", "Requests whose client left", counts.cancelled)
    yield CounterMetricFamily("mpitp_computed_tokens", "Tokens computed", counts.tokens)
    yield CounterMetricFamily("mpitp_steps", "Steps computed", counts.steps)
    yield CounterMetricFamily("mpitp_step_seconds", "Seconds spent in steps", counts.step_seconds)
