"""Architecture: what llama.cpp calls a family's tensors and sizes, and how it stores them."""

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
"""Published names of the tensors that belong to no block."""
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
"""Those of a block's attention, without the number of the block and ".weight"."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
"""Those of the norms of queries and keys, likewise."""
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
"""Those of a feed-forward layer, likewise."""
EXPERT_STACKS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Those of stacks, whose experts were published one by one; {} is an expert's number."""
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Those of the expert that every token has."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures was published.

    A tensor of a block is found in `blocks` by its whole name behind `blk.N.`, or without
    ".weight" or ".bias", which then stays.
    """

    published: str  # `architectures` of config.json, a key of `MODELS`
    entries: Callable[[Described], dict[str, Any]]  # of config.json, beside the common ones
    blocks: Mapping[str, str]
    stacks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outside: Mapping[str, str] = dataclasses.field(default_factory=lambda: OUTSIDE_BLOCKS)
    # Tensors that differ in more than the name, by their whole names as in `blocks` or `outside`.
    conversions: Callable[[Described], Mapping[str, Conversion]] = lambda model: {}
    layer: str = "model.layers."  # in front of a layer's number
    eps: str = "rms_norm_eps"  # the field that has it
    # Whole published names of what a draft head has beside its layer; empty: it is passed over.
    draft_head: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Values that the layers compute of options that change the output; None: `entries` reads it.
    options: Mapping[str, tuple[Any, ...] | None] = dataclasses.field(default_factory=dict)
