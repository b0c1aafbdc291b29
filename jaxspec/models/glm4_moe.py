"""GLM-4.5, 4.6 and 4.7: grouped-query attention, and experts in all but the first layers."""

import dataclasses

from jaxspec.models.config import FULL_ATTENTION, SPARSE, ModelConfig
from jaxspec.models.deepseek_base import (
    OPTIONS,
    DeepSeekBase,
    draft_layer_count,
    feed_forward_types,
    layer_count,
    read_experts,
)
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG

_OPTIONS = OPTIONS | {"decoder_sparse_step": (1,)}
_BIASES = ("q_proj", "k_proj", "v_proj")  # `attention_bias` gives none to o_proj
_PARTIAL_ROTARY = 0.5  # used if config.json has none


class Glm4Moe(DeepSeekBase):
    """Attention of Llama or Qwen3 with the experts and the draft head of DeepSeek-V3.

    GLM-4.5 Team 2025, "GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models", arXiv
    2508.06471. Half of each head is rotated.
    """

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        count = layer_count(fields, (FULL_ATTENTION,))
        config = fields.common(
            (FULL_ATTENTION,) * count,
            feed_forward_types(fields, count),
            may_have_biases=True,
            default_partial_rotary=_PARTIAL_ROTARY,
        )
        return dataclasses.replace(
            config,
            normed_heads=fields.find("use_qk_norm", FLAG) or False,
            attention_biases=_BIASES if config.attention_biases else (),
            num_draft_layers=draft_layer_count(fields),
            draft_feed_forward_type=SPARSE,
            parts=(read_experts(fields),),
        )
