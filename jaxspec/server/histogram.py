"""Histogram: how often values fell between bounds, in counters of our own."""

import bisect
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of latencies."""
LENGTHS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
"""Bounds of numbers of tokens."""


class Histogram:
    """Counts by upper bound. One thread adds; reading takes no lock.

    A value may count several times at once: tokens that came together share their gap.
    """

    def __init__(self, bounds: Sequence[float]):
        """Start empty, with ascending `bounds`."""
        self.bounds, self.total = tuple(bounds), 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def include(self, other: "Histogram") -> None:
        """Count all values of one with the same bounds, too."""
        self._counts = [own + more for own, more in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: how many values are at most each bound."""
        found, so_far = list[tuple[str, float]](), 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), so_far))
        return found
