"""Qwen3-Next and Qwen3-Coder-Next: a mixture of experts in every layer not listed as dense."""

from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.gated_hybrid import GatedHybrid, hybrid_config
from jaxspec.models.kinds import FLAG
from jaxspec.models.layers.moe import MoEConfig


class Qwen3Next(GatedHybrid):
    """Qwen3-Next. It has a draft head, which its config.json does not mention."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        renormalise = fields.need("norm_topk_prob", FLAG)
        experts = MoEConfig.read(fields, renormalise=renormalise, shared=True)
        return hybrid_config(
            fields,
            fields.feed_forward_types(),
            (experts,),
            by_key_head=True,
            published_draft_layers=1,
        )
