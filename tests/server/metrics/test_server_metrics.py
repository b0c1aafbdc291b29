"""What the server counts of requests."""

from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.metrics.server_metrics import ServerMetrics


def test_a_sample_s_times_are_those_of_its_metrics():
    metrics = ServerMetrics()
    sample = RequestMetrics(arrival_time=1.0)
    sample.record_row(1.125)
    sample.record_tokens(1, 1.5)
    sample.record_tokens(4, 3.5)
    metrics.note_end("stop", sample)
    totals = {name: found.total for name, found in metrics.latencies.items() if found.count}
    assert totals == {
        "time_to_first_token_seconds": 0.5,
        "e2e_request_latency_seconds": 2.5,
        "request_queue_time_seconds": 0.125,
        "request_prefill_time_seconds": 0.375,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.375,
        "request_time_per_output_token_seconds": 0.5,
    }
    assert metrics.sizes["request_generation_tokens"].total == 5
    assert metrics.ends == {"stop": 1}


def test_a_sample_without_tokens_has_no_times():
    metrics = ServerMetrics()
    metrics.note_end("abort", RequestMetrics())
    metrics.note_end("error", None)
    begun = RequestMetrics()
    begun.record_row(begun.arrival_time)
    metrics.note_end("abort", begun)
    assert not any(found.count for found in metrics.latencies.values())
    assert metrics.ends == {"abort": 2, "error": 1}


def test_a_prompt_counts_when_the_engine_took_it():
    metrics = ServerMetrics()
    metrics.note_request(7, SamplingParams(n=3, max_tokens=9))
    metrics.note_request(1, SamplingParams(max_tokens=None))
    assert metrics.num_prompt_tokens == 8
    assert metrics.sizes["request_params_n"].total == 4
    assert metrics.sizes["request_params_max_tokens"].count == 1


def test_tokens_that_came_together_share_their_gap(monkeypatch):
    now = iter([10.0, 11.0, 11.5])
    monkeypatch.setattr("jaxspec.server.metrics.server_metrics.time.monotonic", lambda: next(now))
    metrics = ServerMetrics()
    latency = metrics.latency()
    latency.note(0, 1)
    latency.note(0, 4)
    latency.note(0, 0)  # no token, no gap
    latency.note(1, 2)  # another sample begins
    found = metrics.latencies["inter_token_latency_seconds"]
    assert found.count == 4 and found.total == 1.0


def test_counts_of_several_event_loops_add_up():
    parts = [ServerMetrics(), ServerMetrics()]
    for number, part in enumerate(parts, 1):
        part.note_request(number, SamplingParams(n=3))
        part.note_end("stop", None)
        part.rejections["queue_full"] += 1
    parts[1].num_cached_tokens = 2
    together = ServerMetrics.total(parts)
    assert (together.num_prompt_tokens, together.num_cached_tokens) == (3, 2)
    assert together.ends == {"stop": 2} and together.rejections == {"queue_full": 2}
    assert together.sizes["request_params_n"].count == 2
    assert parts[0].sizes["request_params_n"].count == 1
