"""The routes of the engine itself: its cache, its profiles and its sizes."""

import pytest
from served import serving

from jaxspec.api.async_llm import AsyncLLM

PROMPT = list(range(100, 180))


def cached(served):
    """Prompt tokens that a repeat finds in the cache."""
    for _ in range(3):
        found = served.post("/v1/completions", prompt=PROMPT, max_tokens=1).json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_prefixes_are_dropped_on_request(served):
    assert cached(served) > 0
    assert served.post("/reset_prefix_cache").status_code == 200
    found = served.post("/v1/completions", prompt=PROMPT, max_tokens=1).json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("word", ["start", "stop"])
def test_profiles_need_a_folder(served, word):
    found = served.post(f"/{word}_profile")
    assert found.status_code == 400
    assert "profiler_folder" in found.json()["error"]["message"]


def test_the_engine_is_described_in_vllms_words(served):
    found = served.get("/server_info", params={"config_format": "json"}).json()
    assert found["vllm_config"]["scheduler_config"]["max_num_seqs"] == 8
    assert found["vllm_config"]["model_config"]["max_model_len"] == 512
    text = served.get("/server_info").json()["vllm_config"]
    assert isinstance(text, str) and "max_num_seqs" in text
    assert served.get("/server_info", params={"config_format": "yaml"}).status_code == 400


@pytest.mark.soak
def test_a_profile_is_written_between_two_calls(short_model, tmp_path):
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64]}
    with serving(lambda: AsyncLLM(short_model, profiler_folder=tmp_path, **options)) as served:
        assert served.post("/stop_profile").status_code == 400
        assert served.post("/start_profile").status_code == 200
        assert served.post("/start_profile").status_code == 400
        served.post("/v1/completions", prompt=[1, 2], max_tokens=2)
        assert served.post("/stop_profile").status_code == 200
    assert list(tmp_path.rglob("*.xplane.pb"))
