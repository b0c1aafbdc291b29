"""Qwen3-Next and Qwen3.5 in GGUF: Gated DeltaNet, gated attention, zero-centred norms."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.gguf.architecture import (
    ATTENTION,
    DENSE,
    EXPERT_STACKS,
    HEAD_NORMS,
    SHARED_EXPERT,
    Architecture,
)
from jaxspec.models.gguf.attention import qwen_experts
from jaxspec.models.gguf.conversion import (
    LESS_ONE,
    LOG_OF_NEGATED,
    Conversion,
    by_key_head,
    column,
    convolution,
    row,
    tiled,
)
from jaxspec.models.gguf.described import Described
from jaxspec.models.kinds import SIZE, whole

_BLOCKS = {
    **ATTENTION,
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SEPARATE = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
# Files of 2025 have ssm_in as on the hub; later ones have q, k, v (attn_qkv) apart from z.
_BY_KEY_HEAD = {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_EXPERTS = {
    **SHARED_EXPERT,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}
_DRAFT_HEAD = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
_ONE_SHARED = {"expert_shared_count": (0, 1), "expert_weights_norm": None}
_CENTRED = (
    "attn_norm.weight",
    "attn_k_norm.weight",
    "attn_q_norm.weight",
    "nextn.enorm.weight",
    "nextn.hnorm.weight",
    "nextn.shared_head_norm.weight",
    "output_norm.weight",
    "post_attention_norm.weight",
)


def _entries(model: Described) -> dict[str, Any]:
    sizes, entries = model.sizes, model.attention()
    interval = sizes.find("full_attention_interval", SIZE) or 4  # llama.cpp's default
    entries.setdefault("partial_rotary_factor", 1.0)  # the families' default differs
    return {
        **entries,
        **model.key_heads(),
        "full_attention_interval": interval,
        "linear_conv_kernel_dim": sizes.need("ssm.conv_kernel", SIZE),
        "linear_key_head_dim": sizes.need("ssm.state_size", SIZE),
        "linear_num_key_heads": sizes.need("ssm.group_count", SIZE),
        "linear_num_value_heads": sizes.need("ssm.time_step_rank", SIZE),
        "linear_value_head_dim": model.value_dim(),
        "mtp_num_hidden_layers": model.num_draft_blocks,
    }


def _dense(model: Described) -> dict[str, Any]:
    width = model.sizes.need("feed_forward_length", whole(1, 2**31 - 1))
    return {"intermediate_size": width, **_entries(model)}


def _sparse(model: Described) -> dict[str, Any]:
    shared = model.sizes.need("expert_shared_feed_forward_length", SIZE)
    experts = qwen_experts(model)
    return {"shared_expert_intermediate_size": shared, **experts, **_entries(model)}


def _conversions(model: Described) -> dict[str, Conversion]:
    return {
        **dict.fromkeys(_CENTRED, Conversion(change=LESS_ONE)),
        "ffn_gate_inp_shexp.weight": Conversion(row),
        "ssm_a": Conversion(column, change=LOG_OF_NEGATED),
        "ssm_conv1d.weight": Conversion(convolution),
    }


def _in_turns(model: Described) -> Mapping[str, Conversion]:
    """Qwen3.5: value heads are interleaved over key heads, so llama.cpp can repeat these."""
    sizes = model.sizes
    key_heads = sizes.need("ssm.group_count", SIZE)
    value_heads = sizes.need("ssm.time_step_rank", SIZE)
    keys = 2 * key_heads * sizes.need("ssm.state_size", SIZE)
    heads, behind_keys = tiled(key_heads, value_heads), tiled(key_heads, value_heads, keys)
    return _conversions(model) | {
        "attn_gate.weight": Conversion(rows=heads),
        "attn_qkv.weight": Conversion(rows=behind_keys),
        "ssm_a": Conversion(column, rows=heads, change=LOG_OF_NEGATED),
        "ssm_alpha.weight": Conversion(rows=heads),
        "ssm_beta.weight": Conversion(rows=heads),
        "ssm_conv1d.weight": Conversion(convolution, rows=behind_keys),
        "ssm_dt.bias": Conversion(rows=heads),
        "ssm_out.weight": Conversion(columns=heads),
    }


def _by_parts(model: Described) -> Mapping[str, Conversion]:
    """Qwen3-Next: queries, keys and values of all key heads, then z."""
    sizes = model.sizes
    key_heads, key_dim = sizes.need("ssm.group_count", SIZE), sizes.need("ssm.state_size", SIZE)
    values = sizes.need("ssm.time_step_rank", SIZE) // key_heads * model.value_dim()
    order = by_key_head(key_heads, (key_dim, key_dim, values, values))
    joined = Conversion(rows=order, behind=("attn_gate.weight",))
    return _conversions(model) | {"attn_qkv.weight": joined}


QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    _dense,
    _BLOCKS | _SEPARATE | DENSE,
    conversions=_in_turns,
    draft_head=_DRAFT_HEAD,
    options={"expert_count": (0,)},
)
QWEN35_MOE = Architecture(
    "Qwen3_5MoeForCausalLM",
    _sparse,
    _BLOCKS | _SEPARATE | _EXPERTS,
    stacks=EXPERT_STACKS,
    conversions=_in_turns,
    draft_head=_DRAFT_HEAD,
    options=_ONE_SHARED,
)
QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    _sparse,
    _BLOCKS | _BY_KEY_HEAD | _EXPERTS,
    stacks=EXPERT_STACKS,
    conversions=_by_parts,
    options=_ONE_SHARED,
)
