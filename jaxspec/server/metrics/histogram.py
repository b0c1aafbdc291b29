"""Histogram with Prometheus' buckets and no locks."""

import bisect
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket bounds of latencies, in seconds."""
LENGTHS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
"""Bucket bounds of token counts."""


class Histogram:
    """Counts by upper bound. One thread adds; reading takes no lock.

    A value may be counted several times at once: tokens of one delta share its latency.
    """

    def __init__(self, bounds: Sequence[float]):
        """Start empty; `bounds` must be ascending."""
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
