"""/metrics: what the engine does and has done, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mpitp.infer.blocks import BLOCK
from mpitp.serve.service import Service


class Metrics:
    """Reads the numbers when they are asked for; `num_ranks` of the model."""

    def __init__(self, service: Service, num_ranks: int) -> None:
        self._service, self._num_ranks = service, num_ranks
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        engine, counts = self._service.engine, self._service.counts
        total = engine.pool.num_blocks
        yield GaugeMetricFamily("mpitp_ranks", "Ranks that compute", self._num_ranks)
        yield GaugeMetricFamily("mpitp_texts_running", "Texts that are computed in each step", len(engine.running))
        waiting = max(0, self._service.texts_left - len(engine.running))
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
        yield CounterMetricFamily(
            "mpitp_text_steps", "Steps times the texts that got tokens in them", engine.chosen_runs
        )
        yield CounterMetricFamily("mpitp_drafted_tokens", "Tokens tried by speculation", engine.drafted_tokens)
        yield CounterMetricFamily(
            "mpitp_accepted_tokens",
            "Of these, right ones; over mpitp_text_steps, plus 1: tokens of a text a step",
            engine.accepted_tokens,
        )
        yield CounterMetricFamily("mpitp_preemptions", "Texts that had to wait again", engine.preemptions)
        yield CounterMetricFamily("mpitp_steps", "Steps computed", counts.steps)
        yield CounterMetricFamily("mpitp_step_seconds", "Seconds spent in steps", counts.step_seconds)
