"""Histograms count as a sorted list would."""

import random

from jaxspec.server.metrics.server_metrics import LENGTHS, Histogram


def test_buckets_count_what_is_at_most_their_bound():
    draw, histogram, values = random.Random(1), Histogram(LENGTHS), []
    for _ in range(200):
        value, times = draw.choice([0, 1, 2, 3, 10, 999, 10**7]), draw.randrange(1, 4)
        histogram.add(value, times)
        values += [value] * times
    for bound, count in histogram.buckets():
        assert count == sum(value <= float(bound) for value in values)
    assert histogram.count == len(values) and histogram.total == sum(values)
    assert histogram.buckets()[-1][0] == "+Inf"


def test_one_may_include_another():
    first, second = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    first.add(0.5)
    second.add(1.5, 3)
    second.add(9.0)
    first.include(second)
    assert first.buckets() == [("1.0", 1), ("2.0", 4), ("+Inf", 5)] and first.total == 14.0
    assert second.count == 4
