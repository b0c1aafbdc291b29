"""Engine metrics under vLLM's names, as `LLM.get_metrics` returns them."""

import dataclasses

from jaxspec.engine.engine import Engine
from jaxspec.scheduler.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class Metric:
    """Named metric with labels."""

    name: str
    labels: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Counter(Metric):
    """Count that never decreases."""

    value: int


@dataclasses.dataclass(frozen=True)
class Gauge(Metric):
    """Current value."""

    value: float


@dataclasses.dataclass(frozen=True)
class Vector(Metric):
    """Counters per draft position, starting at the first draft."""

    values: list[int]


@dataclasses.dataclass(frozen=True)
class Histogram(Metric):
    """Counts of values in buckets.

    Attributes:
        count: Number of values.
        sum: Their sum.
        buckets: For each upper bound, as text, the number of values up to it; the last is "+Inf".
    """

    count: int
    sum: float
    buckets: dict[str, int]


def labels_of(model_name: str) -> dict[str, str]:
    """Return the labels of an engine's metrics."""
    return {"model_name": model_name, "engine": "0"}


def kv_cache_usage(scheduler: Scheduler) -> float:
    """Return the fraction of pages held by requests, in [0, 1]; cached prefixes count as free."""
    num_pages = scheduler.shapes.num_pages - 1  # without the null page
    return (num_pages - scheduler.pages.num_free) / num_pages


def metrics_of(engine: Engine, model_name: str) -> list[Metric]:
    """Return the metrics that the engine shares with vLLM, labelled with the model's name."""
    scheduler, drafts = engine.scheduler, engine.acceptance
    prefixes = scheduler.prefixes.counts
    labels = labels_of(model_name)
    return [
        Gauge("vllm:num_requests_running", labels, len(scheduler.running)),
        Gauge("vllm:num_requests_waiting", labels, len(scheduler.waiting)),
        Gauge("vllm:kv_cache_usage_perc", labels, kv_cache_usage(scheduler)),
        Counter("vllm:num_preemptions", labels, scheduler.num_preemptions),
        Counter("vllm:prefix_cache_queries", labels, prefixes.num_queries),
        Counter("vllm:prefix_cache_hits", labels, prefixes.num_hits),
        Counter("vllm:generation_tokens", labels, engine.metrics.num_tokens),
        Counter("vllm:spec_decode_num_drafts", labels, drafts.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", labels, drafts.num_draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", labels, drafts.num_accepted_tokens),
        Vector(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            labels,
            list(drafts.accepted_per_position),
        ),
    ]
