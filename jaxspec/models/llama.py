"""Llama dense: attention in every layer, queries and keys without norms, no draft head."""

import dataclasses

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields

# Options that change the output, and their values that the layers compute.
_OPTIONS = {"sliding_window": ()}
_THETA = 10000.0  # Llama 2's config.json does not give it
_DERIVED = ".rotary_emb.inv_freq"  # older checkpoints store what config.json says of the rotation


class Llama(Model):
    """A Llama checkpoint."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """The common fields; queries and keys have no norms.

        Raises:
            ValueError: as `Fields.common`, there are recurrent layers, or attention has a window.
        """
        fields.refuse_all_but(_OPTIONS)
        config = fields.common(fields.attention_layer_types(), default_theta=_THETA)
        return dataclasses.replace(config, normed_heads=False)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """The name itself; None for the frequencies of the rotation, which are computed."""
        return None if name.endswith(_DERIVED) else name
