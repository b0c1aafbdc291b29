"""Nemotron-3, Granite 4 hybrid, Falcon-H1 and Mamba2: models with Mamba2 layers.

The sources are models.md and the families' fixtures; of sampling they give the end ids alone, so
these generation configs say no more.
"""

from benchmarks.measure.mamba_shapes import MAMBA_SHAPES
from benchmarks.published.model import PublishedModel

_NANO, _LIGHTNING = "nemotron-3-nano-30b-a3b", "nemotron-3.5-lightning-30b-a3b"
_NEMOTRON = {
    # Its file has these of attention as well, which has no positions.
    "rope_theta": 10000,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "model_type": "nemotron_h",
    "attention_bias": False,
    "bos_token_id": 1,
    "chunk_size": 128,
    "eos_token_id": 2,
    "expand": 2,
    "intermediate_size": 1856,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_shared_experts": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
}
_GRANITE_SMALL = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_dropout": 0.0,
    # Source of the four factors: Granite 4.0's files, from memory.
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "logits_scaling": 16,
    "residual_multiplier": 0.22,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "normalization_function": "rmsnorm",
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "position_embedding_type": "nope",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000,
    "shared_intermediate_size": 1536,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}
# Its multipliers are left out, because no source gives them; an absent one is 1.
_FALCON = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 4608,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 65537,
}
_MAMBA2 = {
    **MAMBA_SHAPES["mamba2-2.7b"].config(),
    "model_type": "mamba2",
    "bos_token_id": 0,
    "chunk_size": 256,
    "eos_token_id": 0,
    "expand": 2,
    "hidden_act": "silu",
    "residual_in_fp32": True,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
}
MAMBA_MODELS = {
    **{
        name: PublishedModel(
            {**MAMBA_SHAPES[name].config(), **_NEMOTRON},
            {"bos_token_id": 1, "eos_token_id": [2, 11]},
        )
        for name in (_NANO, _LIGHTNING)
    },
    "granite-4-h-small": PublishedModel(
        _GRANITE_SMALL, {"bos_token_id": 100257, "eos_token_id": 100257}
    ),
    "falcon-h1-1.5b": PublishedModel(_FALCON, {"bos_token_id": 1, "eos_token_id": 11}),
    "mamba2-2.7b": PublishedModel(_MAMBA2, {"bos_token_id": 0, "eos_token_id": 0}),
}
