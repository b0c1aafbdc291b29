"""Kimi-Linear: Kimi Delta Attention, and latent attention in some layers.

The sources are models.md and the family's fixtures; of sampling they give nothing, so this
generation config says the end id alone.
"""

from benchmarks.published.model import PublishedModel

_LAYERS = 27
_FULL = (4, 8, 12, 16, 20, 24, 27)  # counted from 1
_CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": list(_FULL),
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 1 + _LAYERS) if layer not in _FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
KIMI_MODELS = {
    "kimi-linear-48b-a3b": PublishedModel(
        _CONFIG, {"bos_token_id": 163584, "eos_token_id": 163586}
    ),
}
