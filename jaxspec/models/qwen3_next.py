"""Qwen3-Next and Qwen3-Coder-Next: a mixture of experts in every layer but those named."""

from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.gated_hybrid import GatedHybrid, hybrid_config
from jaxspec.models.kinds import FLAG
from jaxspec.models.layers.moe import MoEConfig


class Qwen3Next(GatedHybrid):
    """A Qwen3-Next checkpoint. Its config.json is silent about the draft head."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """See `hybrid_config`; the projections of the recurrent layers come head by head.

        Raises:
            ValueError: a field is missing, malformed or not implemented.
        """
        renormalise = fields.need("norm_topk_prob", FLAG)
        experts = MoEConfig.read(fields, renormalise=renormalise, shared=True)
        return hybrid_config(fields, fields.feed_forward_types(), (experts,), by_key_head=True)
