"""Histograms of the lengths and times of finished samples, under vLLM's names."""

import bisect
from collections.abc import Sequence

from jaxspec.engine.metrics import Histogram, labels_of
from jaxspec.requests.request import Request, RequestMetrics
from jaxspec.scheduler.request_observer import RequestObserver

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket bounds of latencies, in seconds."""
LENGTHS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
"""Bucket bounds of token counts."""
TEXTS = {
    "time_to_first_token_seconds": "Seconds from a tokenized prompt to its first token.",
    "request_time_per_output_token_seconds": "Mean seconds per token after the first, by sample.",
    "e2e_request_latency_seconds": "Seconds from a tokenized prompt to a sample's last token.",
    "request_queue_time_seconds": "Seconds from a tokenized prompt to a sample's first row.",
    "request_prefill_time_seconds": "Seconds from a sample's first row to its first token.",
    "request_decode_time_seconds": "Seconds from a sample's first token to its last.",
    "request_inference_time_seconds": "Seconds from a sample's first row to its last token.",
    "request_prompt_tokens": "Number of tokens per prompt.",
    "request_generation_tokens": "Number of generated tokens per sample.",
}


class Observations:
    """Counts of values by upper bound. One thread adds; reading takes no lock.

    A value may be counted several times at once: tokens of one delta share its latency.
    """

    def __init__(self, bounds: Sequence[float]):
        """Start without values; a last bucket has those above all `bounds`."""
        self.bounds, self.total = tuple(bounds), 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def include(self, other: "Observations") -> None:
        """Add the counts of observations with the same bounds."""
        self._counts = [own + more for own, more in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        return sum(self._counts)

    def metric(self, name: str, labels: dict[str, str]) -> Histogram:
        """Return the counts so far as a metric."""
        return Histogram(name, labels, self.count, self.total, self.buckets())

    def buckets(self) -> dict[str, int]:
        """Return Prometheus' cumulative buckets: the number of values up to each bound."""
        found, so_far = dict[str, int](), 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            so_far += count
            found["+Inf" if bound == float("inf") else repr(float(bound))] = so_far
        return found


class RequestHistograms(RequestObserver):
    """Counts each sample when it has been read to its end; aborted ones are not counted."""

    def __init__(self) -> None:
        """Start without samples."""
        self._found = {
            name: Observations(SECONDS if name.endswith("_seconds") else LENGTHS) for name in TEXTS
        }

    def settle(self, request: Request) -> None:
        """Count a finished sample; a prompt is counted with its first one."""
        if request.index == 0:
            self._found["request_prompt_tokens"].add(len(request.prompt))
        self.count(request.metrics)

    def count(self, metrics: RequestMetrics) -> None:
        """Count a sample's output tokens, and its times if it has any."""
        self._found["request_generation_tokens"].add(metrics.num_tokens)
        row, first, last = metrics.scheduled_time, metrics.first_token_time, metrics.last_token_time
        if row is None or first is None or last is None:
            return
        self._found["request_queue_time_seconds"].add(row - metrics.arrival_time)
        self._found["request_prefill_time_seconds"].add(first - row)
        self._found["request_inference_time_seconds"].add(last - row)
        self._found["time_to_first_token_seconds"].add(first - metrics.arrival_time)
        self._found["e2e_request_latency_seconds"].add(last - metrics.arrival_time)
        self._found["request_decode_time_seconds"].add(last - first)
        if metrics.tpot is not None:
            self._found["request_time_per_output_token_seconds"].add(metrics.tpot)

    def metrics(self, model_name: str) -> list[Histogram]:
        """Return the histograms, labelled with the model's name."""
        return [
            found.metric(f"vllm:{name}", labels_of(model_name))
            for name, found in self._found.items()
        ]
