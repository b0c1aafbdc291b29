"""Law 9, of every family: a loaded checkpoint gives what transformers gave.

`reference.safetensors` of a fixture has that, computed in float32.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import load_model
from jaxspec.pallas import dispatch

WITH_HEADS = [
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_tied", "qwen3_5_moe_wide"),
    *("nemotron_h", "nemotron_h_latent", "nemotron_h_wide", "deepseek_v3", "deepseek_v32"),
    *("glm4_moe", "glm4_moe_lite", "bailing_hybrid"),
]
OTHERS = [
    *("qwen3", "qwen3_moe", "llama", "llama_draft", "granite", "qwen2", "gpt_oss", "gemma4"),
    *("mamba2", "granitemoehybrid", "falcon_h1", "lfm2", "kimi_linear", "gemma4_moe"),
    "gemma4_shared",
]
# Not nemotron_h_latent: which half of its experts competes is often a near tie.
IN_BFLOAT16 = [
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_vl", "qwen3_next", "nemotron_h", "nemotron_h_wide"),
    *("qwen3_moe", "llama", "llama_draft", "mamba2", "granitemoehybrid", "falcon_h1", "lfm2"),
    *("granite", "qwen2", "gpt_oss", "gemma4", "gemma4_shared"),
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
]
# Ops whose kernels a fixture's sizes allow.
ON_A_GPU = {
    "qwen3_5_moe_wide": ("moe_route", "moe_experts"),
    "nemotron_h_wide": (
        *("moe_route", "moe_experts", "attention_inputs", "mamba2_inputs", "mamba2_step"),
    ),
}


FIRST = "qwen3_5", "kimi_linear"  # whose prompts are computed in the quick suite, too


@pytest.fixture(
    scope="module", params=[*FIRST, *(x for x in (*WITH_HEADS, *OTHERS) if x not in FIRST)]
)
def loaded(request, fixture_folder, reference):
    return load_model(fixture_folder(request.param), jnp.float32), reference(request.param)


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def assert_near(logits, expected):
    """As near as bfloat16 comes."""
    assert np.abs(logits - expected).mean() <= 0.15
    assert (logits.argmax(-1) == expected.argmax(-1)).mean() >= 0.9


def all_ids(expected):
    return np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])


@pytest.mark.few(2)
def test_a_prompt_in_chunks_gives_the_reference_logits(loaded, single_request):
    model, expected = loaded
    ids = all_ids(expected)
    # What is wide is slow, and gets no single tokens here.
    chunks = (1, 7, 64, len(ids)) if model.config.hidden_size < 128 else (7, len(ids))
    for chunk in chunks:
        hidden, logits = single_request(model).prefill(ids, chunk)
        assert_close(logits, expected["logits_full"], 5e-4)
        if model.has_draft_head:  # which reads them
            assert_close(hidden, expected["hidden_final"], 5e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [1, 4])
def test_decoding_and_verification_give_the_reference_logits(loaded, single_request, count):
    model, expected = loaded
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    logits = single_request(model).decode(prompt, greedy, count)
    assert_close(logits, expected["logits_decode"], 2e-4)
    np.testing.assert_array_equal(logits.argmax(-1), greedy)


@pytest.mark.few(3)
def test_rejected_drafts_leave_no_trace(loaded, single_request):
    model, expected = loaded
    logits = single_request(model).verify(expected["prompt_ids"], expected["greedy_ids"])
    assert_close(logits, expected["logits_decode"][1 : 1 + len(logits)], 2e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("loaded", WITH_HEADS, indirect=True)
def test_the_draft_head_gives_the_reference_logits(loaded, single_request):
    model, expected = loaded
    ids = all_ids(expected)
    request = single_request(model)
    out, logits = request.draft(ids[1:], expected["hidden_final"][:-1], 0, prefill=True)
    assert_close(out, expected["mtp_hidden_tf"], 1e-4)
    assert_close(logits, expected["mtp_logits_tf"], 1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("loaded", WITH_HEADS, indirect=True)
def test_the_draft_head_recurses_to_the_reference_drafts(loaded, single_request):
    model, expected = loaded
    prompt, drafts = expected["prompt_ids"], expected["mtp_draft_ids"]
    request = single_request(model)
    hidden, _ = request.prefill(prompt)
    next_tokens = np.append(prompt[1:], expected["greedy_ids"][0])
    out, logits = request.draft(next_tokens, hidden, 0, prefill=True)
    for step, draft in enumerate(drafts):
        assert_close(logits[-1], expected["mtp_draft_logits"][step], 1e-4)
        assert logits[-1].argmax() == draft
        out, logits = request.draft([draft], out[-1:], len(prompt) + step, prefill=False)


def test_a_draft_head_is_there_only_where_the_checkpoint_has_one(fixture_folder):
    """Its tensors tell."""
    for name in OTHERS:
        assert not load_model(fixture_folder(name), jnp.float32).has_draft_head


@pytest.mark.few(1)
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16_weights_stay_near_the_reference(name, fixture_folder, reference, single_request):
    model, expected = load_model(fixture_folder(name), jnp.bfloat16), reference(name)
    _, logits = single_request(model).prefill(all_ids(expected))
    assert_near(logits, expected["logits_full"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_kernels_stay_near_the_reference(name, fixture_folder, reference, single_request):
    """In bfloat16, on sizes that they take: a prompt, verification of it, and the draft head."""
    model = load_model(fixture_folder(name), jnp.bfloat16)
    expected, dtype = reference(name), jnp.dtype("bfloat16")
    prompt, greedy, ids = expected["prompt_ids"], expected["greedy_ids"], all_ids(expected)
    with dispatch.choices() as chosen:
        hidden, logits = single_request(model, dtype).prefill(ids)
        assert_near(logits, expected["logits_full"])
        for count in (1, 4):
            logits = single_request(model, dtype).decode(prompt, greedy, count)
            assert_near(logits, expected["logits_decode"])
        _, logits = single_request(model, dtype).draft(ids[1:], hidden[:-1], 0, prefill=True)
        assert_near(logits, expected["mtp_logits_tf"])
    for op in ON_A_GPU[name]:
        assert {how for each, how, _ in chosen if each == op} == {"kernel"}, op
