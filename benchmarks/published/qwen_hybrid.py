"""Qwen3.5 (dense and with experts) and Qwen3-Next."""

from typing import Any

from benchmarks.measure.shapes import ATTENTION, GDN, HIDDEN, INTERMEDIATE
from benchmarks.published.model import PublishedModel

_GENERATION = {
    "bos_token_id": 248044,
    "do_sample": True,
    "eos_token_id": [248046, 248044],
    "pad_token_id": 248044,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


def _config(
    kind: str, architecture: str, sizes: dict[str, Any], heads: str, gdn: str, *, tied: bool
) -> dict[str, Any]:
    """The vision-language config.json, whose `text_config` jaxspec reads; without its tower."""
    attention, linear = ATTENTION[heads], GDN[gdn]
    layers = sizes["num_hidden_layers"]
    text = {
        "model_type": f"{kind}_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "layer_types": [
            "linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": linear.key_dim,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_value_head_dim": linear.value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": 248320,
        **sizes,
    }
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": tied,
    }


def _dense(name: str, layers: int, heads: str, *, tied: bool) -> PublishedModel:
    sizes = {
        "hidden_size": HIDDEN[name],
        "intermediate_size": INTERMEDIATE[name],
        "num_hidden_layers": layers,
    }
    config = _config("qwen3_5", "Qwen3_5ForConditionalGeneration", sizes, heads, heads, tied=tied)
    return PublishedModel(config, _GENERATION)


_EXPERTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# Qwen3-Next's file has neither `layer_types` nor a field of its draft head.
_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_NEXT_GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}
QWEN_HYBRIDS = {
    "qwen3.5-0.8b": _dense("qwen3.5-0.8b", 24, "qwen3.5-0.8b", tied=True),
    "qwen3.5-9b": _dense("qwen3.5-9b", 32, "qwen3.5-9b", tied=False),
    "qwen3.5-27b": _dense("qwen3.5-27b", 64, "qwen3.5-27b", tied=False),
    "qwen3.5-35b-a3b": PublishedModel(
        _config(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            _EXPERTS,
            "qwen3.5-35b-a3b",
            "qwen3.5-9b",
            tied=False,
        ),
        _GENERATION,
    ),
    "qwen3-next-80b-a3b": PublishedModel(_NEXT, _NEXT_GENERATION),
}
