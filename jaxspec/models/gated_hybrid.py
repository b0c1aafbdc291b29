"""GatedHybrid: the common base of Qwen3-Next, Qwen3.5 and their successors."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from jaxspec.models.base import Model
from jaxspec.models.config import DENSE, LINEAR_ATTENTION, SPARSE, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import whole
from jaxspec.models.layers.gated_delta_net import GatedDeltaNetConfig
from jaxspec.models.layers.mtp_head import MTPHead, has_draft_head

_OPTIONS = {
    "output_gate_type": ("swish", "silu"),
    "attn_output_gate": (True,),
    "mtp_use_dedicated_embeddings": (False,),
}
_DRAFT_LAYERS = whole(0, 1)  # published heads have one layer
# Prefixes of a text model's tensors, and those of a vision tower: transformers', then mlx's.
_TEXT = {"model.language_model.": "model.", "language_model.": ""}
_VISION = ("model.visual.", "vision_tower.")


class GatedHybrid(Model):
    """Gated DeltaNet and gated attention, zero-centred norms, and an MTP draft head.

    Its subclasses are the families; they define the feed-forward layers and the layout of the
    projections in the checkpoint.
    """

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """See `Model`. With a checkpoint, its tensors decide whether there is a draft head.

        `mtp_num_hidden_layers` is no evidence: some re-exported checkpoints keep it without the
        tensors, and others have the tensors without it.
        """
        super().__init__(config, dtype, tensors)
        if has_draft_head(config, tensors):
            self.draft_head = MTPHead(config, self.trunk.layers, dtype)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """Return a tensor's name in text-only spelling; None for the vision tower."""
        if name.startswith(_VISION):
            return None
        for prefix, published in _TEXT.items():
            if name.startswith(prefix):
                return published + name.removeprefix(prefix)
        return name


def hybrid_config(
    fields: Fields,
    feed_forward_types: tuple[str, ...] | None = None,
    parts: tuple[Any, ...] = (),
    *,
    by_key_head: bool = False,
    published_draft_layers: int = 0,
) -> ModelConfig:
    """Read the common fields, those of Gated DeltaNet, and the number of draft layers.

    Args:
        fields: The entries of config.json.
        feed_forward_types: See `Fields.common`.
        parts: The family's other parts of the config.
        by_key_head: See `GatedDeltaNetConfig`.
        published_draft_layers: Default number of draft layers if config.json has none.

    Raises:
        ValueError: A field is missing, malformed or not implemented.
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
