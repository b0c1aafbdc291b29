"""Qwen3-Next and Qwen3-Coder-Next: a mixture of experts in every layer but those named."""

from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.gated_hybrid import GatedHybrid, hybrid_config
from jaxspec.models.kinds import FLAG
from jaxspec.models.layers.moe import MoEConfig


class Qwen3Next(GatedHybrid):
    """A Qwen3-Next checkpoint. It has a draft head, of which its config.json says nothing."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """See `hybrid_config`; the projections of the recurrent layers come head by head.

        Raises:
            ValueError: a field is missing, malformed or not implemented.
        """
        renormalise = fields.need("norm_topk_prob", FLAG)
        experts = MoEConfig.read(fields, renormalise=renormalise, shared=True)
        return hybrid_config(
            fields,
            fields.feed_forward_types(),
            (experts,),
            by_key_head=True,
            published_draft_layers=1,
        )
