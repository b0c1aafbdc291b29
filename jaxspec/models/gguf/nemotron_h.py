"""Nemotron-H and Nemotron-3 in GGUF: a block is Mamba2, attention or a feed-forward layer."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.gguf.architecture import Architecture
from jaxspec.models.gguf.attention import rotated_by_pairs
from jaxspec.models.gguf.conversion import Conversion
from jaxspec.models.gguf.described import EXPERTS, Described
from jaxspec.models.gguf.mamba2 import mamba2_conversions, mamba2_sizes, mamba2_tensors
from jaxspec.models.kinds import FLAG, SIZE, number, whole
from jaxspec.models.nemotron_h import MAMBA2_FIELDS

_BLOCKS = {
    **mamba2_tensors("mixer."),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_STACKS = {
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
}
_WIDTH = whole(0, 2**20)


def _entries(model: Described) -> dict[str, Any]:
    key_heads, attending = model.mixed_key_heads()
    widths = model.by_layer("feed_forward_length", _WIDTH)
    letters = "".join(
        _letter(model, *each) for each in zip(range(len(widths)), attending, widths, strict=True)
    )
    dense = {width for letter, width in zip(letters, widths, strict=True) if letter == "-"}
    return {
        **model.attention(),
        **key_heads,
        **(mamba2_sizes(model, MAMBA2_FIELDS) if "M" in letters else {}),
        **({"intermediate_size": max(dense)} if dense else {}),
        **(_experts(model) if "E" in letters else {}),
        "hybrid_override_pattern": letters,
    }


def _letter(model: Described, number: int, attends: bool, width: int) -> str:
    """Return a block's type as Nemotron's letter, by the same rule as llama.cpp."""
    if width:
        return "E" if f"blk.{number}.ffn_gate_inp.weight" in model.file.tensors else "-"
    return "*" if attends else "M"


def _experts(model: Described) -> dict[str, Any]:
    sizes = model.sizes
    return {
        "n_routed_experts": sizes.need("expert_count", EXPERTS),
        "num_experts_per_tok": sizes.need("expert_used_count", SIZE),
        "moe_intermediate_size": sizes.need("expert_feed_forward_length", SIZE),
        "moe_shared_expert_intermediate_size": sizes.need(
            "expert_shared_feed_forward_length", SIZE
        ),
        "moe_latent_size": sizes.find("moe_latent_size", _WIDTH) or None,
        "n_group": sizes.find("expert_group_count", EXPERTS) or 1,
        "topk_group": sizes.find("expert_group_used_count", EXPERTS) or 1,
        "norm_topk_prob": sizes.find("expert_weights_norm", FLAG) or False,
        "routed_scaling_factor": sizes.find("expert_weights_scale", number(0, 1e3)) or 1.0,
    }


def _conversions(model: Described) -> Mapping[str, Conversion]:
    return {**rotated_by_pairs(model), **mamba2_conversions(model)}


NEMOTRON_H = Architecture(
    "NemotronHForCausalLM",
    _entries,
    _BLOCKS,
    stacks=_STACKS,
    conversions=_conversions,
    layer="backbone.layers.",
    eps="layer_norm_epsilon",
    options={
        "expert_gating_func": (2,),
        "expert_group_count": None,
        "expert_shared_count": (1,),
        "expert_weights_norm": None,
        "expert_weights_scale": None,
        "moe_latent_size": None,
    },
)
