"""Models as sizes: a config.json for each, to be run with random weights."""

import dataclasses
from typing import Any

from benchmarks.measure.mamba_shapes import MAMBA_SHAPES, NemotronShape, PureMamba2Shape
from benchmarks.measure.shapes import ATTENTION, GDN, HIDDEN, AttentionShape, GdnShape
from benchmarks.published import MODELS


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """The experts of a layer, all of one width."""

    experts: int  # that compete
    chosen: int
    width: int
    shared: int = 0  # width of the expert that every token has

    def fields(self) -> dict[str, Any]:
        """Those of config.json."""
        fields = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.width,
            "norm_topk_prob": True,
        }
        return fields | ({"shared_expert_intermediate_size": self.shared} if self.shared else {})


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes that differ between the models. With recurrent layers every fourth is attention."""

    architecture: str
    hidden: int
    layers: int
    feed_forward: int | ExpertsShape  # the width of a dense one, or the experts of each layer
    attention: AttentionShape
    gdn: GdnShape | None  # None: attention in every layer, and no draft head
    tied: bool
    vocab: int = 248320

    def config(self) -> dict[str, Any]:
        """The fields of config.json that jaxspec reads."""
        fields = {
            "architectures": [self.architecture],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.attention.heads,
            "num_key_value_heads": self.attention.kv_heads,
            "head_dim": self.attention.head_dim,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e7,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": self.tied,
        }
        if isinstance(self.feed_forward, ExpertsShape):
            fields |= self.feed_forward.fields()
        else:
            fields["intermediate_size"] = self.feed_forward
        if self.gdn is None:
            return fields
        # Qwen3-Next's config.json says nothing of its draft head.
        head = {} if self.architecture == NEXT else {"mtp_num_hidden_layers": 1}
        return fields | _recurrent_fields(self.gdn) | head


def _recurrent_fields(gdn: GdnShape) -> dict[str, Any]:
    """Further sizes of the hybrids."""
    return {
        "full_attention_interval": 4,
        "linear_num_key_heads": gdn.key_heads,
        "linear_num_value_heads": gdn.value_heads,
        "linear_key_head_dim": gdn.key_dim,
        "linear_value_head_dim": gdn.value_dim,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
    }


@dataclasses.dataclass(frozen=True)
class PublishedShape:
    """A published model with all layers, or with `layers` of them (`PublishedModel.thin`)."""

    model: str
    layers: int | None = None

    @property
    def vocab(self) -> int:
        return MODELS[self.model].config["vocab_size"]

    def config(self) -> dict[str, Any]:
        """The fields of config.json."""
        published = MODELS[self.model]
        return published.config if self.layers is None else published.thin(self.layers)


DENSE, MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
NEXT, ATTENTION_MOE = "Qwen3NextForCausalLM", "Qwen3MoeForCausalLM"
TINY = AttentionShape(4, 2, 16), GdnShape(2, 4, 16, 16)
TINY_OF_FOUR = TINY[0], GdnShape(4, 4, 16, 16)  # four devices can share it
SMALL = ATTENTION["qwen3.5-0.8b"], GDN["qwen3.5-0.8b"]
MIDDLE = ATTENTION["qwen3.5-9b"], GDN["qwen3.5-9b"]
LARGE = ATTENTION["qwen3.5-27b"], GDN["qwen3.5-27b"]
SPARSE = ATTENTION["qwen3.5-35b-a3b"], GDN["qwen3.5-9b"]
WIDE = ATTENTION["qwen3.5-122b-a10b"], GDN["qwen3.5-122b-a10b"]
SHAPES: dict[str, ModelShape | PublishedShape | NemotronShape | PureMamba2Shape] = {
    "tiny": ModelShape(DENSE, 64, 4, 96, *TINY, tied=True, vocab=512),
    "tiny-of-four": ModelShape(DENSE, 64, 4, 96, *TINY_OF_FOUR, tied=True, vocab=512),
    "tiny-moe": ModelShape(MOE, 64, 4, ExpertsShape(8, 2, 32, 48), *TINY, tied=False, vocab=512),
    "qwen3.5-0.8b": ModelShape(DENSE, HIDDEN["qwen3.5-0.8b"], 24, 3584, *SMALL, tied=True),
    "qwen3.5-2b": ModelShape(DENSE, HIDDEN["qwen3.5-2b"], 24, 6144, *SMALL, tied=True),
    "qwen3.5-4b": ModelShape(DENSE, HIDDEN["qwen3.5-4b"], 32, 9216, *MIDDLE, tied=True),
    "qwen3.5-9b": ModelShape(DENSE, HIDDEN["qwen3.5-9b"], 32, 12288, *MIDDLE, tied=False),
    "qwen3.5-27b": ModelShape(DENSE, HIDDEN["qwen3.5-27b"], 64, 17408, *LARGE, tied=False),
    "qwen3.5-35b-a3b": ModelShape(
        MOE, 2048, 40, ExpertsShape(256, 8, 512, shared=512), *SPARSE, tied=False
    ),
    "qwen3.5-122b-a10b": ModelShape(
        MOE, 3072, 48, ExpertsShape(256, 8, 1024, shared=1024), *WIDE, tied=False
    ),
    # 36 of its 48 layers: 123 GB in bfloat16, which leaves some 20 GB of an H200.
    "qwen3-next-80b": ModelShape(
        NEXT, 2048, 36, ExpertsShape(512, 10, 512, shared=512), *SPARSE, tied=False, vocab=151936
    ),
    "qwen3-30b-a3b": ModelShape(
        ATTENTION_MOE,
        2048,
        48,
        ExpertsShape(128, 8, 768),
        AttentionShape(32, 4, 128),
        None,
        tied=False,
        vocab=151936,
    ),
    "kimi-linear-48b-a3b": PublishedShape("kimi-linear-48b-a3b"),
    "ling-3.0-tiny": PublishedShape("ling-3.0-tiny"),
    # Three of its layers are dense; the difference of the two is two layers with experts.
    **{f"deepseek-v3.2-{n}-layers": PublishedShape("deepseek-v3.2", n) for n in (4, 6)},
    **MAMBA_SHAPES,
}
