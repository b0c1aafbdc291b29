"""Metrics under the names that vLLM's dashboards ask for; a server's: endpoints/test_metrics.py."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.engine.metrics import Counter, Gauge, Histogram, Vector
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.server.metrics.collector import Collector
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.snapshot import Snapshot

LABELS = {"model_name": "x", "engine": "0"}
SECONDS = {"plan_time": 1.5, "dispatch_time": 0.5, "wait_time": 2.0, "collect_time": 0.25}


BY_VLLM = [
    Gauge("vllm:num_requests_running", LABELS, 3),
    Counter("vllm:generation_tokens", LABELS, 9),
    Vector("vllm:spec_decode_num_accepted_tokens_per_pos", LABELS, [5, 2]),
    *(
        Gauge("vllm:engine_sleep_state", {**LABELS, "sleep_state": state}, value)
        for state, value in {"awake": 0, "weights_offloaded": 1, "discard_all": 0}.items()
    ),
    Histogram("vllm:request_prompt_tokens", LABELS, 2, 9.0, {"5.0": 1, "+Inf": 2}),
]


def text_of(metrics, prefix_caching="all"):
    shapes = SimpleNamespace(page_size=16, num_pages=101)
    limits = SchedulerLimits(prefix_caching=prefix_caching)
    snapshot = Snapshot(True, {**SECONDS, "num_steps": 4}, BY_VLLM, metrics, 0.25)
    registry = CollectorRegistry()
    registry.register(Collector(snapshot, shapes, limits, "a"))
    return generate_latest(registry).decode()


def test_metrics_of_engine_and_server_become_families():
    metrics = ServerMetrics()
    metrics.ends.update(stop=2, error=1)
    metrics.rejections["queue_full"] = 7
    metrics.latencies["inter_token_latency_seconds"].add(0.003, 4)
    text = text_of(metrics)
    found = {
        (sample.name, *(v for k, v in sample.labels.items() if k not in LABELS)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["vllm:num_requests_running",] == 3
    assert found["vllm:generation_tokens_total",] == 9
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 2
    assert found["vllm:request_success_total", "stop"] == 2
    assert found["vllm:corrupted_requests_total",] == 1
    assert found["vllm:admission_rejections_total", "queue_full"] == 7
    assert found["jaxspec:host_seconds_total", "wait"] == 2.0
    assert found["jaxspec:event_loop_lag_seconds",] == 0.25
    assert found["vllm:inter_token_latency_seconds_count",] == 4
    assert found["vllm:inter_token_latency_seconds_bucket", "0.0025"] == 0
    assert found["vllm:inter_token_latency_seconds_bucket", "0.005"] == 4
    assert found["vllm:request_prompt_tokens_bucket", "5.0"] == 1
    assert found["vllm:request_prompt_tokens_bucket", "+Inf"] == 2
    assert found["vllm:request_prompt_tokens_sum",] == 9
    assert 'model_name="a"' in text and 'engine="0"' in text
    assert text.count("# HELP") == text.count("# TYPE") >= 19
    states = {key[1]: value for key, value in found.items() if key[0] == "vllm:engine_sleep_state"}
    assert states == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


@pytest.mark.parametrize(
    "mode, is_on, of_states",
    [
        ("off", "False", "none"),
        ("pages", "True", "none"),
        ("align", "True", "align"),
        ("all", "True", "all"),
    ],
)
def test_how_the_cache_was_set_up_is_told_in_vllm_s_words(mode, is_on, of_states):
    families = text_string_to_metric_families(text_of(ServerMetrics(), mode))
    (family,) = [each for each in families if each.name == "vllm:cache_config_info"]
    (sample,) = family.samples
    assert (family.type, sample.value) == ("gauge", 1)
    assert sample.labels == {
        "model_name": "a",
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "100",
        "enable_prefix_caching": is_on,
        "mamba_cache_mode": of_states,
    }
