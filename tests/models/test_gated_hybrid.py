"""The draft head of the hybrids for a selected token."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import load_model

FIXTURES = ["qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_5_moe_wide", "qwen3_next"]


@pytest.fixture(scope="module", params=FIXTURES)
def loaded(request, fixture_folder, reference):
    return load_model(fixture_folder(request.param), jnp.float32), reference(request.param)


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.soak
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
