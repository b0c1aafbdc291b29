"""Qwen3 with a mixture of experts: other rules of routing, and recurrent layers refused."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle

from jaxspec.models import load_model


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
