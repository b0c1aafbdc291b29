"""Figures under the names that vLLM's dashboards ask for; a server's: endpoints/test_metrics.py."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.metrics import Counter, Gauge, Vector
from jaxspec.server.collector import Collector
from jaxspec.server.figures import Figures

SECONDS = {"plan_time": 1.5, "dispatch_time": 0.5, "wait_time": 2.0, "collect_time": 0.25}


def test_figures_of_engine_and_server_become_families():
    labels = {"model_name": "x", "engine": "0"}
    llm = SimpleNamespace(
        is_healthy=True,
        get_metrics=lambda: [
            Gauge("vllm:num_requests_running", labels, 3),
            Counter("vllm:generation_tokens", labels, 9),
            Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, [5, 2]),
        ],
        metrics=lambda: {**SECONDS, "num_steps": 4},
    )
    figures = Figures()
    figures.ends.update(stop=2, error=1)
    figures.rejections["queue_full"] = 7
    figures.latencies["inter_token_latency_seconds"].add(0.003, 4)
    registry = CollectorRegistry()
    registry.register(Collector(SimpleNamespace(llm=llm, figures=figures, names=("a", "b")), 0.25))
    text = generate_latest(registry).decode()
    found = {
        (sample.name, *(v for k, v in sample.labels.items() if k not in labels)): sample.value
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
    assert 'model_name="a"' in text and 'engine="0"' in text
    assert text.count("# HELP") == text.count("# TYPE") >= 20
