"""Request metrics of the server; the engine counts those of steps and finished samples."""

import time
from collections import Counter
from collections.abc import Iterable

from jaxspec.engine.request_histograms import LENGTHS, SECONDS, Observations
from jaxspec.requests.sampling_params import SamplingParams

LATENCIES = {
    "inter_token_latency_seconds": "Seconds between tokens, averaged over those of one delta.",
}
SIZES = {
    "request_max_num_generation_tokens": "Number of tokens of a prompt's longest sample.",
    "request_params_n": "Number of samples per request (n).",
    "request_params_max_tokens": "max_tokens of requests that set it.",
}


class ServerMetrics:
    """Counters and histograms under vLLM's names without prefix; updated by one event loop."""

    def __init__(self) -> None:
        self.latencies = {name: Observations(SECONDS) for name in LATENCIES}
        self.sizes = {name: Observations(LENGTHS) for name in SIZES}
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
                for name, observations in more.items():
                    own[name].include(observations)
        return together

    def note_request(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Count a prompt that the engine accepted."""
        self.num_prompt_tokens += prompt_tokens
        self.sizes["request_params_n"].add(params.n)
        if params.max_tokens is not None:
            self.sizes["request_params_max_tokens"].add(params.max_tokens)

    def note_end(self, reason: str) -> None:
        """Count a finished sample."""
        self.ends[reason] += 1

    def note_longest(self, num_tokens: int) -> None:
        """Count the longest sample of a prompt, once all its samples have finished."""
        self.sizes["request_max_num_generation_tokens"].add(num_tokens)

    def latency(self) -> "Latency":
        """Return a recorder of one stream's inter-token latencies."""
        return Latency(self.latencies["inter_token_latency_seconds"])


class Latency:
    """Inter-token latencies of a stream: the time between deltas, divided by their tokens."""

    def __init__(self, observations: Observations):
        self._observations = observations
        self._last = dict[int, float]()  # time of the last delta, by sample

    def note(self, sample: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now, last = time.monotonic(), self._last.get(sample)
        self._last[sample] = now
        if last is not None:
            self._observations.add((now - last) / num_tokens, num_tokens)
