"""GatedHybrid: what Qwen3-Next, Qwen3.5 and their successors have in common."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from jaxspec.models.base import Model
from jaxspec.models.config import DENSE, LINEAR_ATTENTION, SPARSE, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import whole
from jaxspec.models.layers.gated_delta_net import GatedDeltaNetConfig
from jaxspec.models.layers.mtp_head import PREFIX, MTPHead

# Options that change the output, and their values that the layers compute.
_OPTIONS = {
    "output_gate_type": ("swish", "silu"),
    "attn_output_gate": (True,),
    "mtp_use_dedicated_embeddings": (False,),
}
_DRAFT_LAYERS = whole(0, 1)  # the head has one, so far in all checkpoints
_VISION_LANGUAGE = "model.language_model."  # the text model's names in such a checkpoint


class GatedHybrid(Model):
    """Gated DeltaNet and gated attention, norms centred at zero, and a multi-token head.

    It is no family. Each of its families says what its feed-forward layers are, and how its
    projections are published.
    """

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
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """A published tensor's name in text-only spelling; None for the vision tower's."""
        if name.startswith("model.visual."):
            return None
        if name.startswith(_VISION_LANGUAGE):
            return "model." + name.removeprefix(_VISION_LANGUAGE)
        return name


def hybrid_config(
    fields: Fields,
    feed_forward_types: tuple[str, ...] | None = None,
    parts: tuple[Any, ...] = (),
    *,
    by_key_head: bool = False,
    published_draft_layers: int = 0,
) -> ModelConfig:
    """The common fields, those of Gated DeltaNet, and whether there is a draft head.

    `feed_forward_types` and `parts` are the family's; `by_key_head` is `GatedDeltaNetConfig`'s.
    `published_draft_layers`: those of the family's checkpoints, where config.json does not say.

    Raises:
        ValueError: a field is missing, malformed or not implemented.
    """
    fields.refuse_all_but(_OPTIONS)
    config = fields.common(fields.layer_types(), feed_forward_types, default_partial_rotary=0.25)
    draft_layers = fields.find("mtp_num_hidden_layers", _DRAFT_LAYERS)
    if LINEAR_ATTENTION in config.layer_types:
        parts = (GatedDeltaNetConfig.read(fields, by_key_head=by_key_head), *parts)
    return dataclasses.replace(
        config,
        gated_attention=True,
        zero_centred_norms=True,
        num_draft_layers=published_draft_layers if draft_layers is None else draft_layers,
        draft_feed_forward_type=SPARSE if SPARSE in config.feed_forward_types else DENSE,
        parts=parts,
    )
