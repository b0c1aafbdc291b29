"""Request metrics of the server; metrics of steps are counted by the engine."""

import bisect
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket bounds of latencies, in seconds."""
LENGTHS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
"""Bucket bounds of token counts."""
LATENCIES = {
    "time_to_first_token_seconds": "Seconds from a tokenized prompt to its first token.",
    "inter_token_latency_seconds": "Seconds between tokens, averaged over those of one delta.",
    "request_time_per_output_token_seconds": "Mean seconds per token after the first, by sample.",
    "e2e_request_latency_seconds": "Seconds from a tokenized prompt to a sample's last token.",
    "request_queue_time_seconds": "Seconds from a tokenized prompt to a sample's first row.",
    "request_prefill_time_seconds": "Seconds from a sample's first row to its first token.",
    "request_decode_time_seconds": "Seconds from a sample's first token to its last.",
    "request_inference_time_seconds": "Seconds from a sample's first row to its last token.",
}
SIZES = {
    "request_prompt_tokens": "Number of tokens per prompt.",
    "request_generation_tokens": "Number of generated tokens per sample.",
    "request_max_num_generation_tokens": "Number of tokens of a prompt's longest sample.",
    "request_params_n": "Number of samples per request (n).",
    "request_params_max_tokens": "max_tokens of requests that set it.",
}


class Histogram:
    """Counts by upper bound. One thread adds; reading takes no lock.

    A value may be counted several times at once: tokens of one delta share its latency.
    """

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.total = tuple(bounds), 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def include(self, other: "Histogram") -> None:
        """Add the counts of a histogram with the same bounds."""
        self._counts = [own + more for own, more in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return Prometheus' cumulative buckets: each bound and the number of values up to it."""
        found, so_far = list[tuple[str, float]](), 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), so_far))
        return found


class ServerMetrics:
    """Counters and histograms under vLLM's names without prefix; updated by one event loop."""

    def __init__(self) -> None:
        self.latencies = {name: Histogram(SECONDS) for name in LATENCIES}
        self.sizes = {name: Histogram(LENGTHS) for name in SIZES}
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.ends = Counter[str]()  # finished samples, by finish reason
        self.rejections = Counter[str]()  # rejected requests, by reason

    @staticmethod
    def total(parts: "Iterable[ServerMetrics]") -> "ServerMetrics":
        """Return the sum over several event loops."""
        together = ServerMetrics()
        for part in parts:
            together.num_prompt_tokens += part.num_prompt_tokens
            together.num_cached_tokens += part.num_cached_tokens
            together.ends.update(part.ends)
            together.rejections.update(part.rejections)
            for own, more in ((together.latencies, part.latencies), (together.sizes, part.sizes)):
                for name, histogram in more.items():
                    own[name].include(histogram)
        return together

    def note_request(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Count a prompt that the engine accepted."""
        self.num_prompt_tokens += prompt_tokens
        self.sizes["request_prompt_tokens"].add(prompt_tokens)
        self.sizes["request_params_n"].add(params.n)
        if params.max_tokens is not None:
            self.sizes["request_params_max_tokens"].add(params.max_tokens)

    def note_end(self, reason: str, metrics: RequestMetrics | None) -> None:
        self.ends[reason] += 1
        if metrics is None:
            return
        self.sizes["request_generation_tokens"].add(metrics.num_tokens)
        row, first, last = metrics.scheduled_time, metrics.first_token_time, metrics.last_token_time
        if row is None or first is None or last is None:
            return
        self.latencies["request_queue_time_seconds"].add(row - metrics.arrival_time)
        self.latencies["request_prefill_time_seconds"].add(first - row)
        self.latencies["request_inference_time_seconds"].add(last - row)
        self.latencies["time_to_first_token_seconds"].add(first - metrics.arrival_time)
        self.latencies["e2e_request_latency_seconds"].add(last - metrics.arrival_time)
        self.latencies["request_decode_time_seconds"].add(last - first)
        if metrics.tpot is not None:
            self.latencies["request_time_per_output_token_seconds"].add(metrics.tpot)

    def note_longest(self, num_tokens: int) -> None:
        """Count the longest sample of a prompt, once all its samples have finished."""
        self.sizes["request_max_num_generation_tokens"].add(num_tokens)

    def latency(self) -> "Latency":
        """Return a recorder of one stream's inter-token latencies."""
        return Latency(self.latencies["inter_token_latency_seconds"])


class Latency:
    """Inter-token latencies of a stream: the time between deltas, divided by their tokens."""

    def __init__(self, histogram: Histogram):
        self._histogram = histogram
        self._last = dict[int, float]()  # time of the last delta, by sample

    def note(self, sample: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now, last = time.monotonic(), self._last.get(sample)
        self._last[sample] = now
        if last is not None:
            self._histogram.add((now - last) / num_tokens, num_tokens)
