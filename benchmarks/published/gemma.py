"""Gemma 4 31B, 26B-A4B, E2B and E4B, and configurations of their assistants.

The sizes are those of the published config.json files, without those of the towers.
"""

from typing import Any

from benchmarks.published.model import PublishedModel

_PATTERN = [*["sliding_attention"] * 5, "full_attention"]


def _config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_k_eq_v": True,
            "bos_token_id": 2,
            "dtype": "bfloat16",
            "enable_moe_block": False,
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
            "num_kv_shared_layers": 0,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
            "vocab_size": 262144,
            **text,
        },
    }


_DENSE = _config(
    {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "layer_types": _PATTERN * 10,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
    }
)
_MOE = _config(
    {
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": _PATTERN * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    }
)
# Fields of E2B that E4B has, too.
_SMALL = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
}
_E2B = _config(
    {
        **_SMALL,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "layer_types": _PATTERN[1:] * 7,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    }
)
_E4B = _config(
    {
        **_SMALL,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_types": _PATTERN * 7,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    }
)
_GENERATION = {
    "bos_token_id": 2,
    "do_sample": True,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
}
GEMMA_MODELS = {
    "gemma-4-31b": PublishedModel(_DENSE, _GENERATION),
    "gemma-4-26b-a4b": PublishedModel(_MOE, _GENERATION),
    "gemma-4-e2b": PublishedModel(_E2B, _GENERATION),
    "gemma-4-e4b": PublishedModel(_E4B, _GENERATION),
}


def assistant_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of an assistant for a target's, like those that Google publishes.

    Three layers have a window, and one full attention. The stream has 256 channels, as E4B's, or
    1,024, as 12B's, but at most half of the target's.
    """
    text = config["text_config"]
    hidden = text["hidden_size"]
    own = {
        "hidden_size": min(hidden // 2, 256 if text["num_kv_shared_layers"] else 1024),
        "intermediate_size": min(text["intermediate_size"], 2048),
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    return {
        **config,
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": hidden,
        "text_config": {**text, **own},
    }
