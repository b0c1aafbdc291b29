"""The dense Qwen3.5 models as sizes: a config.json for each, to be run with random weights."""

import dataclasses
from typing import Any

from benchmarks.measure.shapes import ATTENTION, GDN, HIDDEN, AttentionShape, GdnShape


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What differs between the models; every fourth layer is attention."""

    hidden: int
    layers: int
    intermediate: int
    attention: AttentionShape
    gdn: GdnShape
    tied: bool
    vocab: int = 248320

    def config(self) -> dict[str, Any]:
        """The fields of config.json that jaxspec reads."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "full_attention_interval": 4,
            "num_attention_heads": self.attention.heads,
            "num_key_value_heads": self.attention.kv_heads,
            "head_dim": self.attention.head_dim,
            "linear_num_key_heads": self.gdn.key_heads,
            "linear_num_value_heads": self.gdn.value_heads,
            "linear_key_head_dim": self.gdn.key_dim,
            "linear_value_head_dim": self.gdn.value_dim,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": self.tied,
            "mtp_num_hidden_layers": 1,
        }


SMALL = ATTENTION["qwen3.5-0.8b"], GDN["qwen3.5-0.8b"]
MIDDLE = ATTENTION["qwen3.5-9b"], GDN["qwen3.5-9b"]
LARGE = ATTENTION["qwen3.5-27b"], GDN["qwen3.5-27b"]
SHAPES = {
    "tiny": ModelShape(64, 4, 96, AttentionShape(4, 2, 16), GdnShape(2, 4, 16, 16), True, 512),
    "qwen3.5-0.8b": ModelShape(HIDDEN["qwen3.5-0.8b"], 24, 3584, *SMALL, tied=True),
    "qwen3.5-2b": ModelShape(HIDDEN["qwen3.5-2b"], 24, 6144, *SMALL, tied=True),
    "qwen3.5-4b": ModelShape(HIDDEN["qwen3.5-4b"], 32, 9216, *MIDDLE, tied=True),
    "qwen3.5-9b": ModelShape(HIDDEN["qwen3.5-9b"], 32, 12288, *MIDDLE, tied=False),
    "qwen3.5-27b": ModelShape(HIDDEN["qwen3.5-27b"], 64, 17408, *LARGE, tied=False),
}
