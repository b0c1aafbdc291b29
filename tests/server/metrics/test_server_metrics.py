"""What the server counts of requests."""

from clock import set_clock

from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.metrics import server_metrics
from jaxspec.server.metrics.server_metrics import ServerMetrics


def test_a_prompt_counts_when_the_engine_took_it():
    metrics = ServerMetrics()
    metrics.note_request(7, SamplingParams(n=3, max_tokens=9))
    metrics.note_request(1, SamplingParams(max_tokens=None))
    assert metrics.num_prompt_tokens == 8
    assert metrics.sizes["request_params_n"].total == 4
    assert metrics.sizes["request_params_max_tokens"].count == 1


def test_tokens_that_came_together_share_their_gap(monkeypatch):
    now = iter([10.0, 11.0, 11.5])
    set_clock(monkeypatch, server_metrics, monotonic=lambda: next(now))
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
        part.note_end("stop")
        part.rejections["queue_full"] += 1
    parts[1].num_cached_tokens = 2
    together = ServerMetrics.total(parts)
    assert (together.num_prompt_tokens, together.num_cached_tokens) == (3, 2)
    assert together.ends == {"stop": 2} and together.rejections == {"queue_full": 2}
    assert together.sizes["request_params_n"].count == 2
    assert parts[0].sizes["request_params_n"].count == 1
