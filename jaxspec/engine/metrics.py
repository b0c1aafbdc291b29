"""Engine metrics under vLLM's names, as `LLM.get_metrics` returns them."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.engine.engine import Engine
from jaxspec.engine.gate import Gate
from jaxspec.scheduler.scheduler import Scheduler

SLEEP_STATE = "vllm:engine_sleep_state"
HOST_BYTES = "routed_experts_host_bytes"
"""Key of `LLM.metrics`: bytes of routed experts that were copied to the host."""


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


def sleep_states(gate: Gate, model_name: str, *, is_on_host: bool) -> list[Metric]:
    """Return vLLM's gauges of sleep, of which at most one is 1.

    All are 0 if the caches alone are freed. `is_on_host`: the weights are in host memory.
    """
    is_dropped = gate.is_closed_by("weights") and not is_on_host
    values = {
        "awake": not gate.is_closed_by("weights", "kv_cache"),
        "weights_offloaded": is_on_host,
        "discard_all": is_dropped,
    }
    labels = labels_of(model_name)
    return [
        Gauge(SLEEP_STATE, {**labels, "sleep_state": state}, float(value))
        for state, value in values.items()
    ]


class EngineSnapshot(NamedTuple):
    """All metrics of an engine at one moment."""

    engine: dict[str, Any]  # as `AsyncLLM.metrics`
    by_vllm: list[Metric]  # as `AsyncLLM.get_metrics`

    @property
    def counts(self) -> "EngineSnapshot":
        """The metrics that remain in a total after the engine has ended."""
        by_vllm = [each for each in self.by_vllm if not isinstance(each, Gauge)]
        return EngineSnapshot(_counts(self.engine), by_vllm)

    @staticmethod
    def total(parts: "Sequence[EngineSnapshot]") -> "EngineSnapshot":
        """Return the sums over several engines with the same options; shares are averaged."""
        by_name = dict[tuple[str, ...], list[Metric]]()
        for part in parts:
            for metric in part.by_vllm:
                by_name.setdefault((metric.name, *metric.labels.values()), []).append(metric)
        engine = _sum([part.engine for part in parts])
        engine.setdefault("kv_cache_usage", 0.0)  # all engines have ended
        return EngineSnapshot(engine, [_total(each) for each in by_name.values()])


_SAME = ("shapes", "implementations", "kv_cache", "max_in_flight")  # equal in all engines
_MEANS = ("kv_cache_usage", "vllm:kv_cache_usage_perc", SLEEP_STATE)
_NOTHING: dict[str, Any] = {  # current values of an engine that has ended, in any dict
    "num_running": 0,
    "num_waiting": 0,
    HOST_BYTES: 0,
    "memory_bytes": {},
    "tokens_per_second": 0.0,
    "rounds_per_second": 0.0,
    # Within `prefix_cache`, its host memory and its disk:
    **dict.fromkeys(("num_pages", "num_states", "num_pieces", "num_files"), 0),
    **dict.fromkeys(("num_bytes", "max_bytes"), 0),
}


def _counts(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an engine after its end: no means, and nothing that is current."""
    return {
        name: _NOTHING.get(name, _counts(value) if isinstance(value, dict) else value)
        for name, value in values.items()
        if name not in _MEANS
    }


def _total(metrics: Sequence[Any]) -> Metric:
    first = metrics[0]
    if isinstance(first, Vector):
        return dataclasses.replace(first, values=_sum([each.values for each in metrics]))
    if isinstance(first, Histogram):
        return dataclasses.replace(
            first,
            count=sum(each.count for each in metrics),
            sum=sum(each.sum for each in metrics),
            buckets=_sum([each.buckets for each in metrics]),
        )
    return dataclasses.replace(first, value=_of_name(first.name, [m.value for m in metrics]))


def _sum(values: Sequence[Any]) -> Any:
    """Return the sum of numbers, of lists by position, or of dicts by name."""
    first = values[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _of_name(name, [v[name] for v in values if name in v]) for name in names}
    if isinstance(first, list):
        return [sum(column) for column in itertools.zip_longest(*values, fillvalue=0)]
    return sum(values) if isinstance(first, int | float) else first


def _of_name(name: str, values: Sequence[Any]) -> Any:
    if name in _SAME:
        return values[0]
    return statistics.fmean(values) if name in _MEANS else _sum(values)
