"""Validate options in a GGUF file's metadata: values must be implemented, keys known."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.checks import shown
from jaxspec.models.kinds import Block

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.recurrent_layers": (),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (1.0, 0.0),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0, 0.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (1.0, 0.0),
    "moe_latent_size": (0,),
    "residual_scale": (1.0, 0.0),
    "rope.scale_linear": (1.0, 0.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.factor": (1.0, 0.0),  # llama.cpp applies it even without a type
    "rope.scaling.type": ("none",),
    "router_logit_softcapping": (0.0,),
    "ssm.dt_b_c_rms": (False,),
    "use_parallel_residual": (False,),
}
"""Options that change the output, with the values that all architectures implement."""

_HARMLESS = frozenset(
    {
        "attention.head_count",  # in a model without attention
        "attention.layer_norm_epsilon",  # all norms are RMS norms
        "expert_feed_forward_length",  # in a model without experts
        "expert_group_used_count",  # with a single group
        "expert_used_count",  # in a model without experts
        "feed_forward_length",  # if all layers have experts, or none has a feed-forward part
        "pooling_type",  # only for text embeddings
        "rope.dimension_sections",  # channels per position axis; equal positions for text
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "vocab_size",  # taken from the embedding's shape
    }
)


class Noted(Mapping[str, Any]):
    """Metadata entries that record which of them were read."""

    def __init__(self, entries: Mapping[str, Any]):
        self._entries = entries
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def unread(self) -> list[str]:
        """Return the names of the entries that were not read."""
        return [name for name in self._entries if name not in self._asked]


def refuse_unread(sizes: Block) -> None:
    """Raise ValueError if an unread entry may change the output. Call it after reading all entries.

    A converter may write options that jaxspec does not implement; ignoring them would make the
    output wrong.
    """
    assert isinstance(sizes.entries, Noted)
    unknown = [name for name in sizes.entries.unread() if name not in _HARMLESS]
    if unknown:
        name = unknown[0]
        raise ValueError(
            f"{sizes.file}: `{shown(sizes.prefix + name)[1:-1]}` must be absent, got "
            f"{shown(sizes.entries[name])}, because jaxspec does not know what it changes. "
            "Convert the model without it, or use the folder of its safetensors."
        )
