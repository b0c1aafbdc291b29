"""Law 9 for the hybrids: chunked prefill, decode, verification and draft head reproduce it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import load_model
from jaxspec.pallas import dispatch

FIXTURES = ["qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_5_moe_wide", "qwen3_next"]


@pytest.fixture(scope="module", params=FIXTURES)
def loaded(request, fixture_folder, reference):
    return load_model(fixture_folder(request.param), jnp.float32), reference(request.param)


def assert_near(logits, expected):
    """As near as bfloat16 comes."""
    assert np.abs(logits - expected).mean() <= 0.15
    assert (logits.argmax(-1) == expected.argmax(-1)).mean() >= 0.9


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_loaded_weights_reproduce_the_reference_logits(loaded, single_request):
    model, expected = loaded
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    # What is wide is slow, and gets single tokens where it decodes.
    chunks = (1, 7, 64, len(ids)) if model.config.hidden_size < 128 else (7, len(ids))
    for chunk in chunks:
        hidden, logits = single_request(model).prefill(ids, chunk)
        assert_close(logits, expected["logits_full"], 5e-4)
        assert_close(hidden, expected["hidden_final"], 5e-4)


@pytest.mark.parametrize("count", [1, 4])
def test_decoding_and_verification_reproduce_the_reference_logits(loaded, single_request, count):
    model, expected = loaded
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    logits = single_request(model).decode(prompt, greedy, count)
    assert_close(logits, expected["logits_decode"], 2e-4)
    np.testing.assert_array_equal(logits.argmax(-1), greedy)


def test_rejected_drafts_leave_no_trace(loaded, single_request):
    model, expected = loaded
    logits = single_request(model).verify(expected["prompt_ids"], expected["greedy_ids"])
    assert_close(logits, expected["logits_decode"][1 : 1 + len(logits)], 2e-4)


def test_the_draft_head_reproduces_the_reference_logits(loaded, single_request):
    model, expected = loaded
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    assert model.has_draft_head
    request = single_request(model)
    out, logits = request.draft(ids[1:], expected["hidden_final"][:-1], 0, prefill=True)
    assert_close(out, expected["mtp_hidden_tf"], 1e-4)
    assert_close(logits, expected["mtp_logits_tf"], 1e-4)


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


@pytest.mark.parametrize("prefill", [True, False], ids=["prompt", "verify"])
def test_the_draft_head_does_the_same_for_a_selected_token(loaded, single_request, prefill):
    model, expected = loaded
    hidden, tokens = expected["hidden_final"], expected["prompt_ids"]
    seen = []
    for only_last in (False, True):
        request = single_request(model)
        request.draft(tokens[1:9], hidden[:8], 0, prefill=True, only_last=only_last)
        out, logits = request.draft(
            tokens[9:12], hidden[8:11], 8, prefill=prefill, only_last=only_last
        )
        seen.append((out[-1:], logits[-1:], request.pools["kv"]))
        assert len(out) == (1 if only_last else 3)
    for of_all, of_last in zip(*seen, strict=True):
        assert_close(of_last, of_all, 1e-5)


@pytest.mark.parametrize("fixture", ["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_vl", "qwen3_next"])
def test_bfloat16_weights_stay_near_the_reference(
    fixture_folder, reference, single_request, fixture
):
    model, expected = load_model(fixture_folder(fixture), jnp.bfloat16), reference(fixture)
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    _, logits = single_request(model).prefill(ids)
    assert_near(logits, expected["logits_full"])


@pytest.mark.gpu
def test_kernels_of_experts_stay_near_the_reference(fixture_folder, reference, single_request):
    """In bfloat16, on sizes that they take: a prompt, verification of it, and the draft head."""
    model = load_model(fixture_folder("qwen3_5_moe_wide"), jnp.bfloat16)
    expected, dtype = reference("qwen3_5_moe_wide"), jnp.dtype("bfloat16")
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    ids = np.concatenate([prompt, greedy])
    with dispatch.choices() as chosen:
        hidden, logits = single_request(model, dtype).prefill(ids)
        assert_near(logits, expected["logits_full"])
        for count in (1, 4):
            logits = single_request(model, dtype).decode(prompt, greedy, count)
            assert_near(logits, expected["logits_decode"])
        head = single_request(model, dtype)
        _, logits = head.draft(ids[1:], hidden[:-1], 0, prefill=True)
        assert_near(logits, expected["mtp_logits_tf"])
    for name in ("moe_route", "moe_experts"):
        assert {how for op, how, _ in chosen if op == name} == {"kernel"}, name
