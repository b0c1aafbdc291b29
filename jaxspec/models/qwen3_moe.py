"""Qwen3 with a mixture of experts: attention in every layer, no shared expert, no draft head."""

import dataclasses

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG
from jaxspec.models.layers.moe import MoEConfig


class Qwen3Moe(Model):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        renormalise = fields.need("norm_topk_prob", FLAG)
        experts = MoEConfig.read(fields, renormalise=renormalise, shared=False)
        config = fields.common(
            fields.attention_layer_types(), fields.feed_forward_types(), may_have_biases=True
        )
        return dataclasses.replace(config, parts=(experts,))

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return name
