"""gpt-oss: its published config.json, experts in MXFP4 and in 16 bits."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.published import MODELS
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import FULL_ATTENTION, SLIDING_ATTENTION, SPARSE
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.pallas.matmul.activation import Activation

PUBLISHED = MODELS["gpt-oss-20b"].config


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    assert config.layer_types == (SLIDING_ATTENTION, FULL_ATTENTION) * 12
    assert config.feed_forward_types == (SPARSE,) * 24
    assert config.window == 128 and config.attention_sinks and not config.normed_heads
    assert config.attention_biases == ("q_proj", "k_proj", "v_proj", "o_proj")
    experts = config.part(MoEConfig)
    assert (experts.routing.num_experts, experts.routing.num_chosen) == (32, 4)
    assert experts.activation is Activation.CLAMPED_SWIGLU and experts.has_biases
    assert experts.inputs_first
    listed = {name: value for name, value in PUBLISHED.items() if name != "layer_types"}
    assert parse_config(listed) == config
    assert parse_config(PUBLISHED | {"quantization_config": None}) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 23}, "for each of 24 layers; it has 23 entries"),
        ({"layer_types": ["linear_attention"] * 24}, "unknown kinds"),
        ({"swiglu_limit": 5.0}, "`swiglu_limit` must be 7"),
        ({"sliding_window": None}, "must give `sliding_window`"),
        ({"sliding_window": 1}, "`sliding_window` must be an integer from 2"),
        ({"experts_per_token": 2}, "`num_experts_per_tok` and `experts_per_token` mean the same"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)


def test_experts_in_mxfp4_are_those_in_16_bits(fixture_folder, reference, single_request):
    four, wide = (
        load_model(fixture_folder(name), jnp.float32) for name in ("gpt_oss_mxfp4", "gpt_oss")
    )
    for one, other in zip(four.trunk.layers, wide.trunk.layers, strict=True):
        for name in ("up", "down"):
            of_one, of_other = (
                np.asarray(getattr(each.feed_forward.experts, name).operand.array)
                for each in (one, other)
            )
            np.testing.assert_array_equal(of_one, of_other)
    expected = reference("gpt_oss")
    _, logits = single_request(four).prefill(expected["prompt_ids"])
    wanted = expected["logits_full"][: len(logits)]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=5e-4)


def test_blocks_of_another_shape_are_refused(fixture_folder, tmp_path):
    folder = shutil.copytree(fixture_folder("gpt_oss_mxfp4"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    with pytest.raises(ValueError, match="mlp.experts.down_proj .* instead of"):
        load_model(folder, jnp.float32)
