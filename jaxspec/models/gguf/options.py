"""Options in a GGUF file's metadata: what the layers compute, and no entry that nobody reads."""

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
    "rope.scaling.factor": (1.0, 0.0),  # llama.cpp scales by it where no type is given, too
    "rope.scaling.type": ("none",),
    "router_logit_softcapping": (0.0,),
    "ssm.dt_b_c_rms": (False,),
    "use_parallel_residual": (False,),
}
"""Options that change the output, and their values that the layers of any architecture compute."""

_HARMLESS = frozenset(
    {
        "attention.head_count",  # of a model that has no attention
        "attention.layer_norm_epsilon",  # all norms are RMS norms
        "expert_feed_forward_length",  # of a model that has no experts
        "expert_group_used_count",  # of one group
        "expert_used_count",  # of a model that has no experts
        "feed_forward_length",  # of a model whose layers all have experts, or none
        "pooling_type",  # of embeddings of whole texts
        "rope.dimension_sections",  # which positions count where; for text they are equal
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "vocab_size",  # the embedding tells
    }
)


class Noted(Mapping[str, Any]):
    """Entries that remember which of them were asked for."""

    def __init__(self, entries: Mapping[str, Any]):
        """Take the entries of an architecture, without its prefix."""
        self._entries = entries
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """The entry, which counts as read from now on."""
        self._asked.add(name)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """The names of all entries."""
        return iter(self._entries)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._entries)

    def unread(self) -> list[str]:
        """The names of those that nobody asked for."""
        return [name for name in self._entries if name not in self._asked]


def refuse_unread(sizes: Block) -> None:
    """ValueError if an entry was not read that may change the output. To be called at the end.

    A converter may know options that jaxspec does not; without them the output would be wrong.
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
