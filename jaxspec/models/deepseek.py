"""DeepSeek-V3, V3.2 and GLM-4.7-Flash: latent attention in every layer."""

import dataclasses
from typing import Any

from jaxspec.models.config import LATENT_ATTENTION, SPARSE, ModelConfig
from jaxspec.models.deepseek_base import (
    OPTIONS,
    DeepSeekBase,
    draft_layer_count,
    feed_forward_types,
    layer_count,
    read_experts,
    score_growth,
)
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import SIZE
from jaxspec.models.layers.latent_attention import LatentAttentionConfig
from jaxspec.models.layers.token_indexer import TokenIndexConfig

_OPTIONS = OPTIONS | {"rope_interleave": (True,)}


class DeepSeekV3(DeepSeekBase):
    """Latent attention in every layer; experts in all but the first layers.

    DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437. GLM-4.7-Flash
    (`glm4_moe_lite`) differs in sizes only.
    """

    mixer_words = ("full_attention",)  # of `layer_types`

    @classmethod
    def parse_config(cls, fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        count = layer_count(fields, cls.mixer_words)
        config = fields.common(
            (LATENT_ATTENTION,) * count,
            feed_forward_types(fields, count),
            head_dim=fields.need("qk_rope_head_dim", SIZE),
        )
        return dataclasses.replace(
            config,
            normed_heads=False,
            num_draft_layers=draft_layer_count(fields),
            draft_mixer_type=LATENT_ATTENTION,
            draft_feed_forward_type=SPARSE,
            parts=cls.parts(fields, config),
        )

    @staticmethod
    def parts(fields: Fields, config: ModelConfig) -> tuple[Any, ...]:
        """Return the sizes of attention and of experts; YaRN multiplies scores, too."""
        growth = score_growth(config.rope)
        return LatentAttentionConfig.read(fields, growth=growth), read_experts(fields)


class DeepSeekV32(DeepSeekV3):
    """DeepSeek-V3 whose tokens attend to those that an index selects.

    DeepSeek-AI 2025, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models".
    """

    mixer_words = ("indexed_attention",)

    @staticmethod
    def parts(fields: Fields, config: ModelConfig) -> tuple[Any, ...]:
        attention, experts = DeepSeekV3.parts(fields, config)
        fields.need("q_lora_rank", SIZE)  # the index has queries from their latent
        index = TokenIndexConfig.read(fields)
        if index.head_dim < attention.shared_dim:
            raise ValueError(
                "config.json: `index_head_dim` must be at least `qk_rope_head_dim`, the channels "
                f"that are rotated, got {index.head_dim} and {attention.shared_dim}. Take the "
                "config.json that was published with the weights."
            )
        return attention, index, experts
