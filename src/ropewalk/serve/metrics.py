"""/metrics for Prometheus: vLLM's metrics and their meanings, with the prefix `ropewalk:`.

Totals and states are asked of the engines when somebody reads; histograms are filled as requests end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ropewalk.outputs import RequestOutput

if TYPE_CHECKING:
    from ropewalk.serve.models import Models, Served

PREFIX = "ropewalk:"
_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "request_time_per_output_token_seconds": (
        "Mean time of the tokens after the first, of each request.",
        _SECONDS,
    ),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", _SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_prompt_tokens": ("Tokens of prompts.", _TOKENS),
    "request_generation_tokens": ("Tokens of answers.", _TOKENS),
}


class Metrics:
    """The metrics of one server."""

    def __init__(self, models: Models) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engines(models))
        self._histograms = {
            name: Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = Counter(
            PREFIX + "request_success",
            "Completions that ended, by why.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            PREFIX + "request_refused",
            "Requests that got an error, by HTTP status.",
            ["status"],
            registry=self._registry,
        )

    def refused(self, status: int) -> None:
        """Count a request that got an error."""
        self._refused.labels(str(status)).inc()

    def aborted(self, served: Served, n: int) -> None:
        """Count completions whose client went away."""
        self._success.labels(served.name, "abort").inc(n)

    def ended(self, served: Served, output: RequestOutput) -> None:
        """Count a request that ended."""
        t = output.timings
        values = {
            "time_to_first_token_seconds": t.time_to_first_token_s,
            "e2e_request_latency_seconds": t.time_to_first_token_s + t.decode_s,
            "request_queue_time_seconds": max(0.0, t.time_to_first_token_s - t.prefill_s),
            "request_prefill_time_seconds": t.prefill_s,
            "request_decode_time_seconds": t.decode_s,
            "request_prompt_tokens": t.prompt_tokens,
            "request_generation_tokens": t.generated_tokens,
        }
        if t.generated_tokens > 1:
            values["request_time_per_output_token_seconds"] = t.time_per_token_s
        for name, value in values.items():
            self._histograms[name].labels(served.name).observe(value)
        for completion in output.outputs:
            self._success.labels(served.name, completion.finish_reason).inc()

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self._registry)


class _Engines(Collector):
    """What the engines say of themselves."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        pictures = {served.name: served.engine.statistics() for served in self._models.served.values()}
        gauges = {
            "num_requests_running": ("Completions that run.", "running"),
            "num_requests_waiting": ("Completions that wait to run.", "waiting"),
        }
        counters = {
            "num_preemptions": ("How often a request had to give up its pages.", "preemptions"),
            "prompt_tokens": ("Prompt tokens read, cached ones included.", "prompt_tokens"),
            "generation_tokens": ("Tokens drawn.", "generated_tokens"),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
            "prefix_cache_hits": ("Prompt tokens found there.", "cached_tokens"),
            "spec_decode_num_draft_tokens": ("Guesses of a drafter that were checked.", "drafted_tokens"),
            "spec_decode_num_accepted_tokens": ("Guesses that were right.", "accepted_tokens"),
        }
        for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, attribute) in metrics.items():
                family = kind(PREFIX + name, text, labels=["model_name"])
                for model, picture in pictures.items():
                    family.add_metric([model], getattr(picture, attribute))
                yield family
        usage = GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc",
            "Share of the KV cache's pages in use; 1 is all.",
            labels=["model_name"],
        )
        for model, picture in pictures.items():
            usage.add_metric([model], picture.pages_used / picture.pages if picture.pages else 0.0)
        yield usage
