"""Mamba2 in an engine, and its config.json."""

import json
import shutil

import jax.numpy as jnp
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.models import load_model, parse_config

# The fields that jaxspec reads of mamba2-2.7b's in the spelling of transformers, and some others.
PUBLISHED = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_size": 2560,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 1,
    "num_heads": 80,
    "num_hidden_layers": 64,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, 1e30],
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 50288,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["snapshot", "replay"])
def test_the_engine_needs_no_pages_and_gives_the_reference_ids(fixture_folder, reference, policy):
    """Two samples of one prompt, with drafts from the text; what they share is states alone."""
    expected = reference("mamba2")
    llm = LLM(
        fixture_folder("mamba2"),
        dtype="float32",
        state_policy=policy,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        max_num_seqs=2,
        max_model_len=128,
        prefill_buckets=[64],
        decode_buckets=[2],
        show_progress=False,
    )
    assert "kv" not in llm._runner.memory()
    greedy = expected["greedy_ids"].tolist()
    params = SamplingParams(n=2, temperature=0.0, max_tokens=len(greedy), ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": expected["prompt_ids"].tolist()}, params)
    assert [sample.token_ids for sample in output.outputs] == [greedy, greedy]


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    (sizes,) = config.parts
    assert sizes.heads.features == 5120 and sizes.heads.channels == 5376
    assert config.rope is None and config.num_heads == 0 and config.eos_token_ids == (0,)
    assert len(config.layer_types) == 64 and config.tie_word_embeddings


def test_that_of_codestral_is_read_and_gates_before_the_norm():
    """It says the opposite, which transformers never reads."""
    sizes = {"hidden_size": 4096, "num_heads": 128, "n_groups": 8, "vocab_size": 32768}
    codestral = PUBLISHED | sizes | {"norm_before_gate": True, "tie_word_embeddings": False}
    config = parse_config(codestral)
    (mamba2,) = config.parts
    assert mamba2.heads == (128, 64, 8, 128) and len(config.layer_types) == 64
    assert mamba2.gate_first and mamba2.norm_groups == 8 and not config.tie_word_embeddings


@pytest.mark.parametrize("bounds", [[0, 10**400], [0, float("inf")], [0.0, 1e30], None])
def test_limits_that_limit_nothing_mean_the_same(bounds):
    assert parse_config(PUBLISHED | {"time_step_limit": bounds}) == parse_config(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "`use_bias` must be False, got True"),
        ({"num_heads": 81, "n_groups": 2}, "81 is not a multiple of 2"),
        ({"time_step_limit": [0.001, 1e30]}, "`time_step_limit` must be absent, or 0 and infinity"),
        ({"time_step_limit": [0.0, 0.1]}, "jaxspec does not clamp step sizes"),
        ({"time_step_limit": "no"}, "`time_step_limit` must be absent"),
        ({"time_step_limit": [False, 1e30]}, "`time_step_limit` must be absent"),
        ({"time_step_limit": [0.0, True]}, "`time_step_limit` must be absent"),
        ({"time_step_limit": [0.0, float("nan")]}, "`time_step_limit` must be absent"),
        ({"conv_kernel": 1}, "`conv_kernel` must be an integer from 2 to 64, got 1"),
        ({"conv_kernel": 2**20}, "`conv_kernel` must be an integer from 2 to 64, got 1048576"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)


def test_a_convolution_without_bias_has_none(fixture_folder, tmp_path):
    folder = shutil.copytree(fixture_folder("mamba2"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_conv_bias": False}))
    message = "Unexpected \\(3\\): backbone.layers.0.mixer.conv1d.bias"
    with pytest.raises(ValueError, match=message):
        load_model(folder, jnp.float32)
