"""The architectures of GGUF files that jaxspec has families for; to add one is an entry here.

llama.cpp gives tensors and sizes names of its own. An `Architecture` says what they are called in
the checkpoint on Hugging Face that the file was converted from.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.checks import shown
from jaxspec.gguf.file import GGUFFile
from jaxspec.models.kinds import FLAG, SIZE, WORD, Block, whole

_KEY = "general.architecture"
EXPERTS = whole(0, 4096)
"""Experts of a layer; 0: there are none."""

# Published names of tensors by those in GGUF, without the number of the block and ".weight".
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
# Stacks, whose experts were published one by one.
_EXPERT_STACKS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
OUTSIDE_BLOCKS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Published names of the tensors that belong to no block."""

# Options of any architecture that change the output, and their values that the layers compute.
_OPTIONS = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (),
    "embedding_scale": (1.0, 0.0),
    "logit_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "rope.scale_linear": (1.0, 0.0),
    "rope.scaling.type": ("none",),
    "use_parallel_residual": (False,),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures was published.

    `entries` reads from the metadata what the family's config.json has beside the common fields.
    """

    published: str  # `architectures` of config.json, a key of `MODELS`
    blocks: Mapping[str, str]  # tensors of a block, as above
    stacks: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of experts, as above
    entries: Callable[[Block, str], dict[str, Any]] = lambda metadata, name: {}
    options: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # The two channels that are rotated together lie side by side in queries and keys, and half a
    # head apart where they were published.
    by_pairs: bool = False


def _moe(metadata: Block, name: str) -> dict[str, Any]:
    """Qwen's fields of experts; llama.cpp always renormalises the chosen ones' weights."""
    return {
        "num_experts": metadata.need(f"{name}.expert_count", EXPERTS),
        "num_experts_per_tok": metadata.need(f"{name}.expert_used_count", SIZE),
        "moe_intermediate_size": metadata.need(f"{name}.expert_feed_forward_length", SIZE),
        "norm_topk_prob": metadata.find(f"{name}.expert_weights_norm", FLAG) is not False,
    }


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", _ATTENTION | _DENSE, options={"expert_count": (0,)}, by_pairs=True
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", _ATTENTION | _HEAD_NORMS | _DENSE),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        _ATTENTION | _HEAD_NORMS | _ROUTER,
        stacks=_EXPERT_STACKS,
        entries=_moe,
    ),
}
"""By `general.architecture` of the metadata."""


def architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    """The file's architecture and its name.

    Raises:
        ValueError: it names none, or one that jaxspec has no family for.
    """
    name = Block(file.metadata, file=str(file.path)).need(_KEY, WORD)
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: `{_KEY}` must be one of {', '.join(sorted(ARCHITECTURES))}, got "
            f"{shown(name)}. Use a model of one of those, or the folder of its safetensors."
        )
    return name, ARCHITECTURES[name]


def metadata_of(file: GGUFFile) -> Block:
    """The file's metadata, whose options are such as the layers compute.

    Raises:
        ValueError: as `architecture_of`, or an option is not implemented.
    """
    name, architecture = architecture_of(file)
    metadata = Block(file.metadata, file=str(file.path))
    options = {**_OPTIONS, **architecture.options}
    metadata.refuse_all_but({f"{name}.{key}": values for key, values in options.items()})
    return metadata
