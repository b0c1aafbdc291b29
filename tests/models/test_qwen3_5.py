"""Law 9 for Qwen3.5: chunked prefill, decode, verification and the draft head reproduce it."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import load_model


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_tied"])
def loaded(request, fixture_folder, reference):
    return load_model(fixture_folder(request.param), jnp.float32), reference(request.param)


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_loaded_weights_reproduce_the_reference_logits(loaded, single_request):
    model, expected = loaded
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    for chunk in (1, 7, 64, len(ids)):
        hidden, logits = single_request(model).prefill(ids, chunk)
        assert_close(logits, expected["logits_full"], 5e-4)
        assert_close(hidden, expected["hidden_final"], 5e-4)


def test_part_of_the_head_reproduces_the_reference_logits_of_its_ids(loaded):
    model, expected = loaded
    ids = np.array([200, 3, 17, 263], np.int32)
    logits = model.logits(jnp.asarray(expected["hidden_final"]), model.lm_head_columns(ids))
    assert_close(logits, expected["logits_full"][:, ids], 5e-4)


def test_the_greedy_token_is_that_of_the_reference_logits(loaded):
    model, expected = loaded
    hidden, ids = jnp.asarray(expected["hidden_final"]), np.array([200, 3, 17, 263], np.int32)
    forbidden = jnp.zeros((len(hidden), 0), jnp.int32)
    scores = expected["logits_full"].astype(np.float64)
    for columns, wanted in (None, scores), (model.lm_head_columns(ids), scores[:, ids]):
        tokens = model.greedy_tokens(hidden, forbidden, columns)
        assert tokens.dtype == jnp.int32
        chosen = np.take_along_axis(wanted, np.asarray(tokens)[:, None], axis=1)[:, 0]
        assert_close(chosen, wanted.max(axis=1), 5e-4)


def test_the_text_model_of_a_vision_language_checkpoint_reproduces_the_reference_logits(
    fixture_folder, reference, single_request
):
    expected = reference("qwen3_5_vl")
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    model = load_model(fixture_folder("qwen3_5_vl"), jnp.float32)
    assert model.has_draft_head
    _, logits = single_request(model).prefill(ids, 64)
    assert_close(logits, expected["logits_full"], 5e-4)


@pytest.mark.parametrize("count", [1, 4])
def test_decoding_and_verification_reproduce_the_reference_logits(loaded, single_request, count):
    model, expected = loaded
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    request = single_request(model)
    _, first = request.prefill(prompt)
    logits = [first[-1:]]
    for at in range(0, len(greedy) - 1, count):
        logits.append(request.step(greedy[at : at + count], prefill=False)[1])
    logits = np.concatenate(logits)[: len(greedy)]
    assert_close(logits, expected["logits_decode"], 2e-4)
    np.testing.assert_array_equal(logits.argmax(-1), greedy)


def test_rejected_drafts_leave_no_trace(loaded, single_request):
    model, expected = loaded
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    rng = np.random.default_rng(0)
    request = single_request(model)
    request.prefill(prompt)
    at = 0
    while at < len(greedy) - 4:
        accepted = int(rng.integers(0, 4))
        tokens = greedy[at : at + 4].copy()
        tokens[1 + accepted :] = (tokens[1 + accepted :] + 7) % model.vocab_size
        _, logits = request.step(tokens, prefill=False, accepted=accepted)
        kept = 1 + accepted
        assert_close(logits[:kept], expected["logits_decode"][at + 1 : at + 1 + kept], 2e-4)
        at += kept


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


def test_a_width_of_one_decodes_alike(fixture_folder, reference, single_request):
    model, expected = load_model(fixture_folder("qwen3_5"), jnp.float32), reference("qwen3_5")
    request = single_request(model)
    request.prefill(expected["prompt_ids"])
    request.width = 1
    for step, token in enumerate(expected["greedy_ids"][:4]):
        _, logits = request.step([token], prefill=False)
        assert_close(logits[0], expected["logits_decode"][step + 1], 2e-4)


def test_the_published_spelling_of_the_config_means_the_same(
    tmp_path, fixture_folder, reference, single_request
):
    folder = fixture_folder("qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"], config["dtype"]
    rope = config.pop("rope_parameters")
    config |= {
        "full_attention_interval": 4,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", tmp_path)
    shutil.copy(folder / "generation_config.json", tmp_path)
    model = load_model(tmp_path, jnp.float32)
    assert model.config == load_model(folder, jnp.float32).config
    expected = reference("qwen3_5")
    _, logits = single_request(model).prefill(expected["prompt_ids"])
    assert_close(logits, expected["logits_full"][:70], 5e-4)


def test_bfloat16_weights_stay_near_the_reference(fixture_folder, reference, single_request):
    model, expected = load_model(fixture_folder("qwen3_5"), jnp.bfloat16), reference("qwen3_5")
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    _, logits = single_request(model).prefill(ids)
    assert np.abs(logits - expected["logits_full"]).mean() <= 0.15
    agree = logits.argmax(-1) == expected["logits_full"].argmax(-1)
    assert agree.mean() >= 0.9
