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


def test_a_width_of_one_decodes_alike(fixture_folder, reference, single_request):
    model, expected = load_model(fixture_folder("qwen3_5"), jnp.float32), reference("qwen3_5")
    request = single_request(model)
    request.prefill(expected["prompt_ids"])
    request.width = 1
    for step, token in enumerate(expected["greedy_ids"][:4]):
        _, logits = request.step([token], prefill=False)
        assert_close(logits[0], expected["logits_decode"][step + 1], 2e-4)


@pytest.mark.soak
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
