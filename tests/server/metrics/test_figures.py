"""What the server counts of requests."""

from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.metrics.figures import Figures


def test_a_sample_s_times_are_those_of_its_metrics():
    figures = Figures()
    metrics = RequestMetrics(arrival_time=1.0)
    metrics.record_row(1.125)
    metrics.record_tokens(1, 1.5)
    metrics.record_tokens(4, 3.5)
    figures.note_end("stop", metrics)
    totals = {name: found.total for name, found in figures.latencies.items() if found.count}
    assert totals == {
        "time_to_first_token_seconds": 0.5,
        "e2e_request_latency_seconds": 2.5,
        "request_queue_time_seconds": 0.125,
        "request_prefill_time_seconds": 0.375,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.375,
        "request_time_per_output_token_seconds": 0.5,
    }
    assert figures.sizes["request_generation_tokens"].total == 5
    assert figures.ends == {"stop": 1}


def test_a_sample_without_tokens_has_no_times():
    figures = Figures()
    figures.note_end("abort", RequestMetrics())
    figures.note_end("error", None)
    begun = RequestMetrics()
    begun.record_row(begun.arrival_time)
    figures.note_end("abort", begun)
    assert not any(found.count for found in figures.latencies.values())
    assert figures.ends == {"abort": 2, "error": 1}


def test_a_prompt_counts_when_the_engine_took_it():
    figures = Figures()
    figures.note_request(7, SamplingParams(n=3, max_tokens=9))
    figures.note_request(1, SamplingParams(max_tokens=None))
    assert figures.num_prompt_tokens == 8
    assert figures.sizes["request_params_n"].total == 4
    assert figures.sizes["request_params_max_tokens"].count == 1


def test_tokens_that_came_together_share_their_gap(monkeypatch):
    now = iter([10.0, 11.0, 11.5])
    monkeypatch.setattr("jaxspec.server.metrics.figures.time.monotonic", lambda: next(now))
    figures = Figures()
    latency = figures.latency()
    latency.note(0, 1)
    latency.note(0, 4)
    latency.note(0, 0)  # no token, no gap
    latency.note(1, 2)  # another sample begins
    found = figures.latencies["inter_token_latency_seconds"]
    assert found.count == 4 and found.total == 1.0


def test_counts_of_several_event_loops_add_up():
    parts = [Figures(), Figures()]
    for number, part in enumerate(parts, 1):
        part.note_request(number, SamplingParams(n=3))
        part.note_end("stop", None)
        part.rejections["queue_full"] += 1
    parts[1].num_cached_tokens = 2
    together = Figures.total(parts)
    assert (together.num_prompt_tokens, together.num_cached_tokens) == (3, 2)
    assert together.ends == {"stop": 2} and together.rejections == {"queue_full": 2}
    assert together.sizes["request_params_n"].count == 2
    assert parts[0].sizes["request_params_n"].count == 1
