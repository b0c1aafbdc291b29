"""GET /metrics: what clients were told is what is counted."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

# Names that vLLM's Grafana dashboards query.
ASKED = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "request_time_per_output_token_seconds_count",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
    "cache_config_info",
    "engine_sleep_state",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
]


def figures(served):
    response = served.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_what_clients_were_told_is_counted(served):
    before = figures(served)
    prompt, num_tokens = "def fibonacci(n):", 0
    for streams in (False, True):
        body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stream": streams}
        response = served.post("/v1/completions", **body)
        num_tokens += 12
        assert response.status_code == 200
    usage = served.post("/v1/completions", prompt=prompt, max_tokens=1).json()["usage"]
    after = figures(served)

    def grew(name, key=None):
        return after[f"vllm:{name}", key] - before.get((f"vllm:{name}", key), 0)

    assert grew("generation_tokens_total") == num_tokens + 1
    assert grew("prompt_tokens_total") == 3 * usage["prompt_tokens"]
    assert grew("request_success_total", "length") == 3
    assert grew("request_generation_tokens_sum") == num_tokens + 1
    assert grew("e2e_request_latency_seconds_count") == 3
    assert grew("time_to_first_token_seconds_bucket", "+Inf") == 3
    assert grew("request_queue_time_seconds_count") == 3
    assert grew("request_max_num_generation_tokens_sum") == num_tokens + 1
    parts = ("request_queue_time_seconds_sum", "request_inference_time_seconds_sum")
    assert sum(map(grew, parts)) == pytest.approx(grew("e2e_request_latency_seconds_sum"))
    assert grew("spec_decode_num_drafts_total") > 0
    assert after["vllm:num_requests_running", None] == 0
    assert after["vllm:kv_cache_usage_perc", None] == 0


def test_the_names_that_dashboards_query_are_there(served):
    served.post("/v1/completions", prompt="a b", max_tokens=4)
    names = {name for name, _ in figures(served)}
    missing = {f"vllm:{name}" for name in ASKED} - names
    assert not missing
