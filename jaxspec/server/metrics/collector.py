"""Prometheus collector that builds metric families from a snapshot."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector as Base

from jaxspec.engine.metrics import SLEEP_STATE, Counter, Gauge, Histogram, Vector, labels_of
from jaxspec.engine.request_histograms import TEXTS
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.server.metrics.server_metrics import LATENCIES, SIZES
from jaxspec.server.metrics.snapshot import Snapshot

_TEXTS = {
    "vllm:num_requests_running": "Number of running samples.",
    "vllm:num_requests_waiting": "Number of samples waiting for a row of the batch.",
    "vllm:kv_cache_usage_perc": "Fraction of KV cache pages held by requests, 0 to 1.",
    "vllm:num_preemptions": "Number of preemptions; a preempted sample is computed again.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:prompt_tokens": "Number of prompt tokens.",
    "vllm:prompt_tokens_cached": "Number of prompt tokens in cached prefixes.",
    "vllm:generation_tokens": "Number of generated tokens.",
    "vllm:spec_decode_num_drafts": "Number of verify steps with drafts.",
    "vllm:spec_decode_num_draft_tokens": "Number of draft tokens.",
    "vllm:spec_decode_num_accepted_tokens": "Number of accepted draft tokens.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Accepted draft tokens by position.",
    "vllm:request_success": "Finished samples by finish reason.",
    "vllm:corrupted_requests": "Samples that ended with non-finite logits.",
    "vllm:admission_rejections": "Rejected requests by reason.",
    "vllm:cache_config": "KV cache configuration: page size, number of pages, prefix caching.",
    SLEEP_STATE: "1 for the state of the engine; all are 0 if its caches sleep alone.",
    "jaxspec:is_healthy": "1 until a step fails, then 0.",
    "jaxspec:host_seconds": "Seconds of the engine thread by stage.",
    "jaxspec:engine_steps": "Number of dispatched steps.",
    "jaxspec:event_loop_lag_seconds": "Seconds until the event loop had run all ready tasks.",
    **{f"vllm:{name}": text for name, text in (TEXTS | LATENCIES | SIZES).items()},
}
_ENGINE_SECONDS = ("plan_time", "dispatch_time", "wait_time", "collect_time")


class Collector(Base):
    """Exports metrics under vLLM's names, for its dashboards, and a few under `jaxspec:`."""

    def __init__(
        self, snapshot: Snapshot, shapes: StepShapes, limits: SchedulerLimits, model_name: str
    ):
        self._snapshot, self._shapes, self._limits = snapshot, shapes, limits
        self._labels = labels_of(model_name)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not collect metrics."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._requests()
        yield from self._settings()
        metrics = self._snapshot.requests
        for group, texts in ((metrics.latencies, LATENCIES), (metrics.sizes, SIZES)):
            for name in texts:
                yield self._histogram(group[name].metric(f"vllm:{name}", self._labels))

    def _engine(self) -> Iterator[Metric]:
        sleep = dict[str, float]()
        for metric in self._snapshot.by_vllm:
            if isinstance(metric, Vector):
                by_position = {str(place): count for place, count in enumerate(metric.values)}
                yield self._counters(metric.name, "position", by_position)
            elif isinstance(metric, Counter):
                yield self._counters(metric.name, None, {"": metric.value})
            elif isinstance(metric, Gauge) and metric.name == SLEEP_STATE:
                sleep[metric.labels["sleep_state"]] = metric.value
            elif isinstance(metric, Gauge):
                yield self._gauge(metric.name, metric.value)
            elif isinstance(metric, Histogram):
                yield self._histogram(metric)
        yield self._gauges(SLEEP_STATE, "sleep_state", sleep)
        engine = self._snapshot.engine
        seconds = {name.removesuffix("_time"): engine[name] for name in _ENGINE_SECONDS}
        yield self._counters("jaxspec:host_seconds", "stage", seconds)
        yield self._counters("jaxspec:engine_steps", None, {"": engine["num_steps"]})

    def _requests(self) -> Iterator[Metric]:
        metrics = self._snapshot.requests
        plain = {
            "vllm:prompt_tokens": metrics.num_prompt_tokens,
            "vllm:prompt_tokens_cached": metrics.num_cached_tokens,
            "vllm:corrupted_requests": metrics.ends["error"],
        }
        for name, value in plain.items():
            yield self._counters(name, None, {"": value})
        yield self._counters("vllm:request_success", "finished_reason", metrics.ends)
        yield self._counters("vllm:admission_rejections", "reason", metrics.rejections)
        yield self._gauge("jaxspec:is_healthy", float(self._snapshot.is_healthy))
        yield self._gauge("jaxspec:event_loop_lag_seconds", self._snapshot.loop_lag)

    def _settings(self) -> Iterator[Metric]:
        """Yield the configuration of the KV cache."""
        shapes, limits, name = self._shapes, self._limits, "vllm:cache_config"
        keeps_states = limits.prefix_caching in ("align", "all")
        config = {
            "block_size": str(shapes.page_size),
            "num_gpu_blocks": str(shapes.num_pages - 1),  # without the null page
            "enable_prefix_caching": str(limits.caches_prefixes),
            "mamba_cache_mode": limits.prefix_caching if keeps_states else "none",
        }
        info = InfoMetricFamily(name, _TEXTS[name], labels=list(self._labels))
        info.add_metric(list(self._labels.values()), config)
        yield info

    def _counters(self, name: str, label: str | None, values: Mapping[str, float]) -> Metric:
        labels = [*self._labels, *([label] if label else ())]
        family = CounterMetricFamily(name, _TEXTS.get(name, name), labels=labels)
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else ())], value)
        return family

    def _histogram(self, metric: Histogram) -> Metric:
        family = HistogramMetricFamily(metric.name, _TEXTS[metric.name], labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(metric.buckets.items()), metric.sum)
        return family

    def _gauges(self, name: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, _TEXTS[name], labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, _TEXTS.get(name, name), labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
