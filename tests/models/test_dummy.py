"""`load_format="dummy"`: a model of config.json's sizes that runs, and needs no file but that."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import HYBRID, folder_of

from jaxspec import LLM, SamplingParams
from jaxspec.models import load_model


@pytest.fixture
def folder(tmp_path, request):
    """A folder with the config.json of a fixture, and no more."""
    shutil.copy(folder_of(request.param) / "config.json", tmp_path)
    return tmp_path


def leaves(model):
    return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(nnx.state(model))]


def kinds(model):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))]


FOLDERS = ["qwen3", "qwen3_5", "qwen3_5_tied", "qwen3_moe", "llama"]


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_it_has_the_parameters_of_the_checkpoint(folder, fixture_folder, request):
    drawn = load_model(folder, jnp.bfloat16, load_format="dummy")
    published = fixture_folder(request.node.callspec.params["folder"])
    loaded = load_model(published, jnp.bfloat16)
    assert kinds(drawn) == kinds(loaded)
    again = load_model(folder, jnp.bfloat16, load_format="dummy")
    for one, other in zip(*map(leaves, (drawn, again)), strict=True):
        np.testing.assert_array_equal(one, other)
        if one.ndim == 2 and min(one.shape) > 2:  # a matrix, but two decays or norms
            assert np.std(one) == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_norms_and_decays_are_those_of_a_model_before_training(folder):
    layer = load_model(folder, jnp.float32, load_format="dummy").trunk.layers[0]
    np.testing.assert_array_equal(layer.input_norm.weight[...], 0.0)  # zero-centred
    np.testing.assert_array_equal(layer.mixer.norm.weight[...], 1.0)
    log_rates, biases = layer.mixer.decay[...].T
    rates, steps = np.exp(log_rates), np.asarray(jax.nn.softplus(biases))
    assert rates.min() >= 1 and rates.max() <= 16
    assert steps.min() > 0.99e-3 and steps.max() < 0.101


@pytest.mark.soak
@pytest.mark.parametrize("folder", [HYBRID], indirect=True)
def test_it_runs_and_drafts(folder):
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3], [250, 7])]
    drafted, plain = (
        LLM(folder, load_format="dummy", dtype="float32", speculative_config=spec, **options)
        for spec in ("auto", None)
    )
    assert drafted.shapes.num_drafts == 3
    outputs = [llm.generate(prompts, params) for llm in (drafted, plain)]
    for one, other in zip(*outputs, strict=True):
        assert one.outputs[0].finish_reason == "length"
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_without_the_heads_entry_there_is_no_head(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["mtp_num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not load_model(folder, jnp.float32, load_format="dummy").has_draft_head
