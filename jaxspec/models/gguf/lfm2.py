"""LFM2 and LFM2-MoE in GGUF: short convolutions and some attention layers."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.gguf.architecture import OUTSIDE_BLOCKS, Architecture
from jaxspec.models.gguf.conversion import Conversion, convolution
from jaxspec.models.gguf.described import EXPERTS, Described
from jaxspec.models.kinds import SIZE, whole

_BLOCKS = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_ROUTER = {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"}
_STACKS = {
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
# The converter's name of the final norm.
_OUTSIDE = OUTSIDE_BLOCKS | {"token_embd_norm.weight": "model.embedding_norm.weight"}


def _entries(model: Described) -> dict[str, Any]:
    key_heads, attending = model.mixed_key_heads()
    return {
        **model.attention(),
        **key_heads,
        "layer_types": ["full_attention" if attends else "conv" for attends in attending],
        "intermediate_size": model.sizes.need("feed_forward_length", whole(1, 2**31 - 1)),
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is the tensors' width
        "conv_L_cache": model.sizes.need("shortconv.l_cache", SIZE),
    }


def _sparse(model: Described) -> dict[str, Any]:
    """Return the fields with experts; llama.cpp always renormalises the chosen weights."""
    sizes = model.sizes
    return {
        **_entries(model),
        "num_dense_layers": sizes.need("leading_dense_block_count", whole(0, 2**20)),
        "num_experts": sizes.need("expert_count", EXPERTS),
        "num_experts_per_tok": sizes.need("expert_used_count", SIZE),
        "moe_intermediate_size": sizes.need("expert_feed_forward_length", SIZE),
        "norm_topk_prob": True,
        "use_expert_bias": model.has("exp_probs_b.bias"),
    }


def _conversions(model: Described) -> Mapping[str, Conversion]:
    return {"shortconv.conv.weight": Conversion(convolution)}


LFM2 = Architecture(
    "Lfm2ForCausalLM",
    _entries,
    _BLOCKS,
    outside=_OUTSIDE,
    conversions=_conversions,
    eps="norm_eps",
    options={"expert_count": (0,)},
)
LFM2_MOE = Architecture(
    "Lfm2MoeForCausalLM",
    _sparse,
    _BLOCKS | _ROUTER,
    stacks=_STACKS,
    outside=_OUTSIDE,
    conversions=_conversions,
    eps="norm_eps",
    options={"expert_gating_func": (2,), "leading_dense_block_count": None},
)
