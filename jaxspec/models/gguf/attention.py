"""Llama and Qwen3 in GGUF: attention in every layer, with dense layers or experts."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.gguf.architecture import (
    ATTENTION,
    DENSE,
    EXPERT_STACKS,
    HEAD_NORMS,
    Architecture,
)
from jaxspec.models.gguf.conversion import Conversion, by_pairs
from jaxspec.models.gguf.described import EXPERTS, Described
from jaxspec.models.kinds import FLAG, SIZE, whole

_NORM = {"ffn_norm": "post_attention_layernorm"}
_BLOCKS = ATTENTION | _NORM


def rotated_by_pairs(model: Described) -> Mapping[str, Conversion]:
    """Return the conversions of queries and keys of architectures like Llama: see `by_pairs`."""
    heads = model.sizes.need("attention.head_count", SIZE)
    key_heads = model.one_of_layers("attention.head_count_kv") if _has_key_heads(model) else heads
    orders = {"attn_q": by_pairs(heads), "attn_k": by_pairs(key_heads or heads)}
    return {
        f"{name}.{kind}": Conversion(rows=order)
        for name, order in orders.items()
        for kind in ("weight", "bias")
    }


def _has_key_heads(model: Described) -> bool:
    return model.sizes.entries.get("attention.head_count_kv") is not None


def _dense(model: Described) -> dict[str, Any]:
    width = model.sizes.need("feed_forward_length", whole(1, 2**31 - 1))
    return {"intermediate_size": width, **model.attention(), **model.key_heads()}


def qwen_experts(model: Described) -> dict[str, Any]:
    """Return Qwen's fields of experts; llama.cpp always renormalises the chosen weights."""
    sizes = model.sizes
    return {
        "num_experts": sizes.need("expert_count", EXPERTS),
        "num_experts_per_tok": sizes.need("expert_used_count", SIZE),
        "moe_intermediate_size": sizes.need("expert_feed_forward_length", SIZE),
        "norm_topk_prob": sizes.find("expert_weights_norm", FLAG) is not False,
    }


LLAMA = Architecture(
    "LlamaForCausalLM",
    _dense,
    _BLOCKS | DENSE,
    conversions=rotated_by_pairs,
    options={"expert_count": (0,)},
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    _dense,
    _BLOCKS | HEAD_NORMS | DENSE,
    options={"expert_count": (0,)},
)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    lambda model: _dense(model) | qwen_experts(model),
    _BLOCKS | HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
    stacks=EXPERT_STACKS,
    options={"expert_weights_norm": None},
)
