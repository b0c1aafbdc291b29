"""Qwen3.5, 3.6 and 3.8, dense: Gated DeltaNet and gated attention, with a multi-token head."""

import dataclasses
from collections.abc import Collection

import jax.numpy as jnp

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields, check_groups
from jaxspec.models.kinds import SIZE, whole
from jaxspec.models.layers.gated_delta_net import GatedDeltaNetConfig
from jaxspec.models.layers.mtp_head import PREFIX, MTPHead

# Options that change the output, and their values that the layers compute.
_OPTIONS = {
    "output_gate_type": ("swish", "silu"),
    "attn_output_gate": (True,),
    "mtp_use_dedicated_embeddings": (False,),
}
_DRAFT_LAYERS = whole(0, 1)  # the head has one, so far in all checkpoints
_VISION_LANGUAGE = (
    "model.language_model."  # the text model's prefix in a vision-language checkpoint
)


class Qwen3_5(Model):
    """The text model of a Qwen3.5 checkpoint: layers of both kinds, norms centred at zero."""

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """See `Model`. The draft head is found by its tensors where there are any to ask.

        Re-exports keep `mtp_num_hidden_layers` without the tensors, and other checkpoints have the
        tensors without the entry.
        """
        super().__init__(config, dtype, tensors)
        if tensors is None:
            has_head = config.num_draft_layers > 0
        else:
            has_head = any(name.startswith(PREFIX) for name in tensors)
        if has_head:
            self.draft_head = MTPHead(config, self.trunk.layers, dtype)

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """The common fields, those of Gated DeltaNet, and whether there is a draft head.

        Raises:
            ValueError: a field is missing, malformed or not implemented.
        """
        fields.refuse_all_but(_OPTIONS)
        config = fields.common(fields.layer_types(), default_partial_rotary=0.25)
        return dataclasses.replace(
            config,
            gated_attention=True,
            zero_centred_norms=True,
            num_draft_layers=fields.find("mtp_num_hidden_layers", _DRAFT_LAYERS) or 0,
            parts=(_gated_delta_net(fields),) if config.num_linear_attention_layers else (),
        )

    @staticmethod
    def canonical_name(name: str) -> str | None:
        """A published tensor's name in text-only spelling; None for the vision tower's."""
        if name.startswith("model.visual."):
            return None
        if name.startswith(_VISION_LANGUAGE):
            return "model." + name.removeprefix(_VISION_LANGUAGE)
        return name


def _gated_delta_net(fields: Fields) -> GatedDeltaNetConfig:
    sizes = GatedDeltaNetConfig(
        key_heads=fields.need("linear_num_key_heads", SIZE),
        value_heads=fields.need("linear_num_value_heads", SIZE),
        key_dim=fields.need("linear_key_head_dim", SIZE),
        value_dim=fields.need("linear_value_head_dim", SIZE),
        conv_kernel=fields.need("linear_conv_kernel_dim", SIZE),
    )
    check_groups(sizes.value_heads, sizes.key_heads, "linear_num_{value,key}_heads")
    return sizes
