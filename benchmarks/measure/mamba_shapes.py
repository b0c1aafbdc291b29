"""Models with Mamba2 layers as sizes: a config.json for each, to be run with random weights."""

import dataclasses
from typing import Any

from benchmarks.measure.shapes import ATTENTION, MAMBA2, AttentionShape, Mamba2Shape


@dataclasses.dataclass(frozen=True)
class LatentExpertsShape:
    """Nemotron-3's experts: no gate, and a shared one beside those that compete."""

    experts: int
    chosen: int
    width: int
    shared: int  # width of the expert that every token has
    scale: float
    latent: int | None = None  # features that the experts read; None: those of the stream

    def fields(self) -> dict[str, Any]:
        """Those of config.json."""
        return {
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.width,
            "moe_shared_expert_intermediate_size": self.shared,
            "moe_latent_size": self.latent,
            "routed_scaling_factor": self.scale,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        }


@dataclasses.dataclass(frozen=True)
class NemotronShape:
    """Sizes that differ between the Nemotron-H models."""

    hidden: int
    pattern: str  # a letter for each layer
    experts: LatentExpertsShape
    mamba2: Mamba2Shape
    attention: AttentionShape
    has_head: bool  # that drafts
    vocab: int = 131072

    def config(self) -> dict[str, Any]:
        """The fields of config.json that jaxspec reads."""
        head = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
        return (
            {
                "architectures": ["NemotronHForCausalLM"],
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "num_hidden_layers": len(self.pattern),
                "hybrid_override_pattern": self.pattern,
                "num_attention_heads": self.attention.heads,
                "num_key_value_heads": self.attention.kv_heads,
                "head_dim": self.attention.head_dim,
                "mamba_num_heads": self.mamba2.heads,
                "mamba_head_dim": self.mamba2.head_dim,
                "n_groups": self.mamba2.groups,
                "ssm_state_size": self.mamba2.state_dim,
                "conv_kernel": 4,
                "layer_norm_epsilon": 1e-5,
                "max_position_embeddings": 262144,
                "tie_word_embeddings": False,
            }
            | self.experts.fields()
            | (head if self.has_head else {})
        )


@dataclasses.dataclass(frozen=True)
class PureMamba2Shape:
    """Sizes that differ between the Mamba2 models."""

    hidden: int
    layers: int
    mamba2: Mamba2Shape
    vocab: int = 50288

    def config(self) -> dict[str, Any]:
        """The fields of config.json that jaxspec reads."""
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_heads": self.mamba2.heads,
            "head_dim": self.mamba2.head_dim,
            "n_groups": self.mamba2.groups,
            "state_size": self.mamba2.state_dim,
            "conv_kernel": 4,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        }


_NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NANO = LatentExpertsShape(128, 6, 1856, shared=3712, scale=2.5)
_SUPER = LatentExpertsShape(512, 22, 2688, shared=5376, scale=5.0, latent=1024)
_TINY = LatentExpertsShape(8, 2, 32, shared=48, scale=2.5)
_HEADS = ATTENTION["nemotron-3-nano"]
MAMBA_SHAPES = {
    "tiny-nemotron": NemotronShape(
        64, "ME*E", _TINY, Mamba2Shape(4, 2, 16, 16), AttentionShape(4, 2, 16), True, vocab=512
    ),
    "nemotron-3-nano-30b-a3b": NemotronShape(
        2688, _NANO_PATTERN, _NANO, MAMBA2["nemotron-3-nano"], _HEADS, has_head=False
    ),
    "nemotron-3.5-lightning-30b-a3b": NemotronShape(
        2688, _NANO_PATTERN, _NANO, MAMBA2["nemotron-3-nano"], _HEADS, has_head=True
    ),
    # 33 of its 88 layers, with its shares of each kind: 93 GB in bfloat16.
    "nemotron-3-super-120b-a12b": NemotronShape(
        4096, "MEMEM*EMEME" * 3, _SUPER, MAMBA2["nemotron-h-8b"], _HEADS, has_head=True
    ),
    "mamba2-2.7b": PureMamba2Shape(2560, 64, MAMBA2["mamba2-2.7b"]),
}
