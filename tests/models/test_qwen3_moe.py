"""Law 9 for Qwen3 with a mixture of experts."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle

from jaxspec.models import load_model


def test_loaded_weights_reproduce_the_reference_logits(fixture_folder, reference, single_request):
    model, expected = load_model(fixture_folder("qwen3_moe"), jnp.float32), reference("qwen3_moe")
    assert not model.has_draft_head
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    ids = np.concatenate([prompt, greedy])
    for chunk in (1, 7, 64, len(ids)):
        _, logits = single_request(model).prefill(ids, chunk)
        np.testing.assert_allclose(logits, expected["logits_full"], rtol=0, atol=5e-4)
    for count in (1, 4):
        logits = single_request(model).decode(prompt, greedy, count)
        np.testing.assert_allclose(logits, expected["logits_decode"], rtol=0, atol=2e-4)


def test_bfloat16_weights_stay_near_the_reference(fixture_folder, reference, single_request):
    model, expected = load_model(fixture_folder("qwen3_moe"), jnp.bfloat16), reference("qwen3_moe")
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    _, logits = single_request(model).prefill(ids)
    assert np.abs(logits - expected["logits_full"]).mean() <= 0.15
    assert (logits.argmax(-1) == expected["logits_full"].argmax(-1)).mean() >= 0.9


@pytest.mark.parametrize("changes", [{"norm_topk_prob": False}, {"num_experts_per_tok": 1}])
def test_other_rules_of_routing_are_as_the_oracle_has_them(
    tmp_path, fixture_folder, reference, single_request, changes
):
    """Weights that do not sum to one, and a single expert a token."""
    folder = shutil.copytree(fixture_folder("qwen3_moe"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    ids = reference("qwen3_moe")["prompt_ids"]
    _, logits = single_request(load_model(folder, jnp.float32)).prefill(ids)
    run = Oracle(folder).start()
    expected = np.stack([run.feed(int(token)) for token in ids])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-4)


def test_recurrent_layers_are_refused(fixture_folder, tmp_path):
    folder = shutil.copytree(fixture_folder("qwen3_moe"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has attention layers only"):
        load_model(folder, jnp.float32)
