"""What an LLM says of itself: its figures, its traces, and vLLM's metrics."""

import pytest
from harness import FIXTURES

from jaxspec import LLM, SamplingParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], list(range(9, 40))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    options = {"max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [64]}
    with LLM(FIXTURES / "qwen3_5", dtype="float32", max_model_len=96, **options) as made:
        yield made


def test_the_memory_map_has_the_weights(llm):
    assert "weights" in llm.memory_map()


def test_a_trace_has_every_step_and_when_the_device_was_done(llm):
    before = llm.metrics()["num_steps"]
    with llm.trace() as steps:
        llm.generate(PROMPTS, GREEDY)
    assert len(steps) == llm.metrics()["num_steps"] - before
    ends = [step.device_end for step in steps]
    assert ends == sorted(ends)
    for step in steps:
        assert step.dispatch_start < step.device_end < step.collect_end + 0.1
        assert step.num_decodes <= step.program.decode_rows
        assert step.num_prompt_tokens <= step.program.prefill_tokens
    # A last token that is computed alone, behind a cached state, runs as a decode.
    num_alone = sum(map(len, PROMPTS)) - sum(step.num_prompt_tokens for step in steps)
    assert 0 <= num_alone <= len(PROMPTS)
    with llm.trace(), pytest.raises(RuntimeError, match="one trace at a time"):
        llm.trace().__enter__()
    llm.generate(PROMPTS, GREEDY)
    assert len(ends) == len(steps) and llm.session.engine.trace is None


def test_metrics_say_what_ran_and_what_holds_memory(llm):
    before = llm.metrics()["num_steps"]
    llm.generate(PROMPTS, GREEDY)
    metrics = llm.metrics()
    assert metrics["num_steps"] > before and metrics["plan_time"] > 0
    assert metrics["num_tokens"] > 0 and metrics["tokens_per_second"] > 0
    assert metrics["compile_seconds"]["4 rows, 3 drafts, 64 prompt tokens, greedy"] > 0
    pools = llm._runner.state.pools
    memory = metrics["memory_bytes"]
    assert memory["kv"] == pools["kv"].nbytes
    assert memory["states"] == pools["recurrent"].states.nbytes
    assert memory["weights"] == sum(leaf.nbytes for leaf in llm._runner._weights)


def test_metrics_have_vllm_s_names(llm):
    llm.generate(PROMPTS, GREEDY)
    found = {metric.name: metric for metric in llm.get_metrics()}
    mine = llm.metrics()
    assert found["vllm:generation_tokens"].value == mine["num_tokens"] > 0
    assert found["vllm:spec_decode_num_drafts"].value == mine["num_rounds"] > 0
    assert found["vllm:num_requests_running"].value == found["vllm:num_requests_waiting"].value == 0
    assert found["vllm:kv_cache_usage_perc"].value == 0.0
    accepted = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert sum(accepted) == found["vllm:spec_decode_num_accepted_tokens"].value


@pytest.mark.soak
def test_prefixes_are_found_counted_and_forgotten():
    """By default where the model has no states; a conversation's next turn begins on the last."""
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64]}
    with LLM(FIXTURES / "qwen3", max_model_len=128, page_size=4, **options) as llm:
        first = llm.generate({"prompt_token_ids": PROMPTS[2]}, GREEDY)[0]
        text = [*PROMPTS[2], *first.outputs[0].token_ids]
        salted = {"prompt_token_ids": text, "cache_salt": "a"}
        found = [llm.generate(p, GREEDY)[0] for p in (text, salted, text, salted)]
        cached = [each.num_cached_tokens for each in (first, *found)]
        known = len(text) - 1 - (len(text) - 1) % 4
        assert cached == [0, known, 0, known, known]
        assert len({tuple(each.outputs[0].token_ids) for each in found}) == 1
        counts = llm.metrics()["prefix_cache"]
        assert counts["num_hits"] == 3 * known and counts["num_pages"] > 0
        values = {each.name: each for each in llm.get_metrics()}
        assert values["vllm:prefix_cache_hits"].value == 3 * known
        assert llm.reset_prefix_cache() and llm.metrics()["prefix_cache"]["num_pages"] == 0
        assert llm.generate(text, GREEDY)[0].num_cached_tokens == 0
    with pytest.raises(RuntimeError, match="once it is closed"):
        llm.reset_prefix_cache()


def test_states_have_their_line_in_the_memory_map():
    sizes = {"max_num_seqs": 2, "max_model_len": 64}
    with LLM(FIXTURES / "qwen3_5", enable_prefix_caching=True, **sizes) as llm:
        count = llm.shapes.num_checkpoints
        assert f"{count} states of prefixes" in llm.memory_map() and count >= 2
        held = llm.metrics()["memory_bytes"]["checkpoints"]
        kept = llm._runner.state.checkpoints["recurrent"]
        assert held == kept.states.nbytes + kept.conv.nbytes
        assert llm.metrics()["prefix_cache"]["num_states"] == 0
