"""Histograms count as a sorted list would, and samples by the times of their metrics."""

import random
from types import SimpleNamespace

from jaxspec.engine.request_histograms import LENGTHS, Observations, RequestHistograms
from jaxspec.requests.request import RequestMetrics


def test_buckets_count_what_is_at_most_their_bound():
    draw, histogram, values = random.Random(1), Observations(LENGTHS), []
    for _ in range(200):
        value, times = draw.choice([0, 1, 2, 3, 10, 999, 10**7]), draw.randrange(1, 4)
        histogram.add(value, times)
        values += [value] * times
    for bound, count in histogram.buckets().items():
        assert count == sum(value <= float(bound) for value in values)
    assert histogram.count == len(values) and histogram.total == sum(values)
    assert list(histogram.buckets())[-1] == "+Inf"


def test_one_may_include_another():
    first, second = Observations((1.0, 2.0)), Observations((1.0, 2.0))
    first.add(0.5)
    second.add(1.5, 3)
    second.add(9.0)
    first.include(second)
    assert first.buckets() == {"1.0": 1, "2.0": 4, "+Inf": 5} and first.total == 14.0
    assert second.count == 4


def totals(histograms):
    return {
        metric.name.removeprefix("vllm:"): metric.sum
        for metric in histograms.metrics("a")
        if metric.count
    }


def test_a_sample_s_times_are_those_of_its_metrics():
    histograms, sample = RequestHistograms(), RequestMetrics(arrival_time=1.0)
    sample.record_row(1.125)
    sample.record_tokens(1, 1.5)
    sample.record_tokens(4, 3.5)
    histograms.count(sample)
    assert totals(histograms) == {
        "time_to_first_token_seconds": 0.5,
        "e2e_request_latency_seconds": 2.5,
        "request_queue_time_seconds": 0.125,
        "request_prefill_time_seconds": 0.375,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.375,
        "request_time_per_output_token_seconds": 0.5,
        "request_generation_tokens": 5,
    }


def test_a_sample_without_tokens_has_no_times():
    histograms, begun = RequestHistograms(), RequestMetrics()
    begun.record_row(begun.arrival_time)
    histograms.count(RequestMetrics())
    histograms.count(begun)
    assert {metric.name for metric in histograms.metrics("a") if metric.count} == {
        "vllm:request_generation_tokens"
    }


def test_a_prompt_is_counted_once_for_all_its_samples():
    histograms = RequestHistograms()
    for index in range(3):
        request = SimpleNamespace(index=index, prompt=(1, 2), metrics=RequestMetrics())
        histograms.settle(request)
    found = {metric.name: metric for metric in histograms.metrics("a")}
    assert found["vllm:request_prompt_tokens"].count == 1
    assert found["vllm:request_prompt_tokens"].sum == 2
    assert found["vllm:request_generation_tokens"].count == 3
    assert found["vllm:request_generation_tokens"].buckets["+Inf"] == 3
    assert found["vllm:request_prompt_tokens"].labels == {"model_name": "a", "engine": "0"}
