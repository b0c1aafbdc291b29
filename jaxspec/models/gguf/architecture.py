"""Architecture: how llama.cpp names and stores a family's tensors and sizes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.models.gguf.conversion import Conversion
from jaxspec.models.gguf.described import Described

OUTSIDE_BLOCKS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Hub names of the tensors outside of blocks."""
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
"""Hub names of a block's attention tensors, without the block's prefix and ".weight"."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
"""The same for the norms of queries and keys."""
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
"""The same for a feed-forward layer."""
EXPERT_STACKS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""The same for stacks of experts, which are separate tensors on the hub; {} is the expert."""
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""The same for the shared expert."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures, mapped to the layout on the hub.

    A tensor of a block is looked up in `blocks` by its full name after `blk.N.`, or without
    ".weight" or ".bias", which is then appended to the result.
    """

    published: str  # `architectures` of config.json, a key of `MODELS`
    entries: Callable[[Described], dict[str, Any]]  # config.json fields beyond the common ones
    blocks: Mapping[str, str]
    stacks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outside: Mapping[str, str] = dataclasses.field(default_factory=lambda: OUTSIDE_BLOCKS)
    # Tensors that differ in more than the name, by their full names.
    conversions: Callable[[Described], Mapping[str, Conversion]] = lambda model: {}
    layer: str = "model.layers."  # prefix of a layer's number on the hub
    eps: str = "rms_norm_eps"  # config.json field of the norms' epsilon
    # Full hub names of a draft head's tensors outside of its layer; empty skips the head.
    draft_head: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Implemented values of options that change the output; None if `entries` reads the option.
    options: Mapping[str, tuple[Any, ...] | None] = dataclasses.field(default_factory=dict)
