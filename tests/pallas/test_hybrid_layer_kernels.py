"""Layers of other families compile for an H200 to kernels, and copy no pool."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from harness import FIXTURES
from sm90 import array, compile_for

from jaxspec.cache import CacheOptions, PoolSizes, Replay, allocate
from jaxspec.models import family_of, parse_config
from jaxspec.models.base import ModelInputs
from jaxspec.models.layers.mixer import LayerInputs
from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.replay import default_window
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user
# The sizes of Falcon-H1-0.5B, and of LFM2-1.2B, where they differ from the fixture's.
FALCON = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
}
LFM2 = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# The sizes of DeepSeek-V3.
DEEPSEEK = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 4,
    "v_head_dim": 128,
}
# And of the token index of V3.2, which selects fewer tokens here than a row has.
INDEXED = DEEPSEEK | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 128}
# Those of GLM-4.7-Flash, and of GLM-4.5-Air.
FLASH = {
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
AIR = {
    "head_dim": 128,
    "hidden_size": 4096,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "use_qk_norm": False,
}
# Those of Kimi-Linear-48B-A3B, with few experts.
KIMI = {
    "hidden_size": 2304,
    "moe_intermediate_size": 1024,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
}
# Those of Ling-3.0-flash, with few experts in one group.
LING = {
    "hidden_size": 2560,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_expert_group": 1,
    "topk_group": 1,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "layer_types": ["full_attention", "linear_attention"] * 2,
}


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(
    ("fixture", "sizes", "expected"),
    [
        ("falcon_h1", FALCON, {"attention_inputs", "paged_attention", "mamba2_conv_replay"}),
        ("lfm2", LFM2, {"conv_update"}),
        ("deepseek_v3", DEEPSEEK, {"latent_attention", "moe_experts"}),
        ("deepseek_v32", INDEXED, {"latent_attention", "index_scores", "moe_experts"}),
        ("glm4_moe_lite", FLASH, {"latent_attention", "moe_experts"}),
        ("glm4_moe", AIR, {"attention_inputs", "paged_attention", "moe_experts"}),
        ("kimi_linear", KIMI, {"gdn_inputs_by_channel", "gdn_replay", "moe_experts"}),
        ("bailing_hybrid", LING, {"gdn_inputs_by_channel", "gdn_replay", "moe_experts"}),
    ],
    ids=[
        "Falcon-H1",
        "LFM2",
        "DeepSeek",
        "V3.2",
        "GLM-4.7-Flash",
        "GLM-4.5-Air",
        "Kimi-Linear",
        "Ling",
    ],
)
def test_a_layer_is_its_kernels(h200, monkeypatch, fixture, sizes, expected, rows):
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    published = json.loads((FIXTURES / fixture / "config.json").read_text()) | sizes
    config = parse_config(published)
    family = family_of(config.architecture, "")
    model = nnx.eval_shape(lambda: family(config, jnp.dtype("bfloat16")))
    graph, params = nnx.split(model.trunk.layers[1])
    dtypes = map(jnp.dtype, ("bfloat16", "bfloat16", "float32"))
    specs = model.cache_specs(CacheOptions(*dtypes, Replay(default_window(4))))
    width, tokens = 4, 4 * rows
    pools = jax.eval_shape(lambda: allocate(specs, PoolSizes(64, 16, 3, width)))

    def step(params, x, delta, decode, per_token, tables, angles, pools):
        inputs = ModelInputs(*(per_token,) * 3, per_token >= 0, tables, decode, None, width)
        return nnx.merge(graph, params)(x, delta, LayerInputs(inputs, angles), pools)

    operands = (
        params,
        array(tokens, config.hidden_size, dtype=jnp.bfloat16),
        array(tokens, config.hidden_size, dtype=jnp.bfloat16),
        DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5),
        array(tokens, dtype=jnp.int32),
        array(3, 16, dtype=jnp.int32),
        config.rope and (array(tokens, config.rope.rotary_dim // 2),) * 2,
        pools,
    )
    with dispatch.choices() as chosen:
        program = compile_for(h200, monkeypatch, step, operands, donated=7)
    assert {how for op, how, _ in chosen if op in expected} == {"kernel"}
    assert expected <= {op for op, _, _ in chosen}
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))
    assert program.memory_analysis().alias_size_in_bytes == held
