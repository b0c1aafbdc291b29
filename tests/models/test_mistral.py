"""Mistral's config.json, and its layers with a window in all of them."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle

from benchmarks.published import MODELS
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import FULL_ATTENTION, SLIDING_ATTENTION

PUBLISHED = MODELS["mistral-7b-v0.3"].config
LISTED = [SLIDING_ATTENTION, FULL_ATTENTION] * 16


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    assert config.layer_types == (FULL_ATTENTION,) * 32 and config.window is None
    assert not config.normed_heads and config.head_dim == 128
    older = parse_config(PUBLISHED | {"sliding_window": 4096})
    assert older.layer_types == (SLIDING_ATTENTION,) * 32 and older.window == 4096
    without = {name: value for name, value in PUBLISHED.items() if name != "sliding_window"}
    assert parse_config(without) == older  # the default of transformers, which null is not
    mixed = parse_config(PUBLISHED | {"sliding_window": 4096, "layer_types": LISTED})
    assert list(mixed.layer_types) == LISTED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": LISTED}, "must give `sliding_window`"),
        ({"sliding_window": 1}, "`sliding_window` must be an integer from 2"),
        ({"layer_types": LISTED[1:]}, "for each of 32 layers; it has 31 entries"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)


def test_a_window_in_all_layers_gives_the_oracle_s_logits(fixture_folder, tmp_path, single_request):
    """Then no layer has pages."""
    folder = shutil.copytree(fixture_folder("llama_draft"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 5}
    changes |= {"layer_types": [SLIDING_ATTENTION] * 2}
    (folder / "config.json").write_text(json.dumps(config | changes))
    run = Oracle(folder).start()
    expected = np.stack([run.feed(token) for token in range(20)])
    model = load_model(folder, jnp.float32)
    _, logits = single_request(model).prefill(np.arange(20), 7)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-4)
