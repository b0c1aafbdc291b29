"""LFM2 and LFM2-MoE: short convolutions, and attention in some layers.

The sources are models.md and the families' fixtures; of sampling they give nothing, so these
generation configs say the end id alone.
"""

from benchmarks.published.model import PublishedModel

_COMMON = {
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
_DENSE = {
    **_COMMON,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_use_swiglu": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_hidden_layers": 16,
    "tie_embedding": True,
}
_MOE = {
    **_COMMON,
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "intermediate_size": 7168,
    "layer_types": [
        "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
    ],
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "use_expert_bias": True,
}
_GENERATION = {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0}
SHORT_CONV_MODELS = {
    "lfm2-1.2b": PublishedModel(_DENSE, _GENERATION),
    "lfm2-8b-a1b": PublishedModel(_MOE, _GENERATION),
}
