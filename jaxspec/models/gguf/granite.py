"""Granite in GGUF: attention, or Mamba2 and attention, with multipliers in the metadata."""

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.models.gguf.architecture import (
    ATTENTION,
    DENSE,
    EXPERT_STACKS,
    SHARED_EXPERT,
    Architecture,
)
from jaxspec.models.gguf.attention import rotated_by_pairs
from jaxspec.models.gguf.conversion import Conversion
from jaxspec.models.gguf.described import Described
from jaxspec.models.gguf.mamba2 import mamba2_conversions, mamba2_sizes, mamba2_tensors
from jaxspec.models.kinds import FLAG, SIZE, number
from jaxspec.models.layers.mamba2 import Mamba2Fields

# On the hub gate_proj and up_proj are one tensor with another name.
_BLOCKS = {
    **ATTENTION,
    **DENSE,
    **SHARED_EXPERT,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_FACTOR = number(0, 1e6)
_OPTIONS = {
    "attention.scale": None,
    "embedding_scale": None,
    "residual_scale": None,
    "logit_scale": None,
    "expert_shared_count": (0, 1),
}


def _multipliers(model: Described) -> dict[str, Any]:
    """Return the multipliers of activations; 0 in the metadata means none."""
    factors: dict[str, Any] = {
        theirs: model.sizes.find(own, _FACTOR) or 1.0 for theirs, own in _MULTIPLIERS.items()
    }
    scale = model.sizes.find("attention.scale", _FACTOR)
    return factors | {"attention_multiplier": scale or 1 / math.sqrt(model.head_dim())}


def _common(model: Described) -> dict[str, Any]:
    """Return the fields that do not depend on the types of layers."""
    sizes, num_experts = model.sizes, model.num_experts
    width = sizes.need("feed_forward_length", SIZE)
    shared = sizes.find("expert_shared_feed_forward_length", SIZE)
    rotates = sizes.find("rope.scaling.finetuned", FLAG) is not False
    entries = {
        **model.attention(),
        **_multipliers(model),
        "position_embedding_type": "rope" if rotates else "nope",
        "intermediate_size": width,
        "num_local_experts": num_experts,
        "shared_intermediate_size": shared or width,
    }
    if num_experts:
        entries["num_experts_per_tok"] = sizes.need("expert_used_count", SIZE)
        entries["shared_intermediate_size"] = sizes.need("expert_shared_feed_forward_length", SIZE)
    return entries


def _attending(model: Described) -> dict[str, Any]:
    return {
        **_common(model),
        **model.key_heads(),
        "layer_types": ["attention"] * model.num_layers,
    }


def _hybrid(model: Described) -> dict[str, Any]:
    key_heads, attending = model.mixed_key_heads()
    kinds = ["attention" if attends else "mamba" for attends in attending]
    return {
        **_common(model),
        **mamba2_sizes(model, Mamba2Fields()),
        **key_heads,
        "layer_types": kinds,
    }


def _hybrid_conversions(model: Described) -> Mapping[str, Conversion]:
    return {**rotated_by_pairs(model), **mamba2_conversions(model)}


GRANITE = Architecture(
    "GraniteMoeHybridForCausalLM",
    _attending,
    _BLOCKS,
    stacks=EXPERT_STACKS,
    conversions=rotated_by_pairs,
    options=_OPTIONS,
)
GRANITE_HYBRID = Architecture(
    "GraniteMoeHybridForCausalLM",
    _hybrid,
    _BLOCKS | mamba2_tensors("mamba."),
    stacks=EXPERT_STACKS,
    conversions=_hybrid_conversions,
    options=_OPTIONS,
)
