"""The draft head of the hybrids for a selected token, and kernels of experts on a GPU."""

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
