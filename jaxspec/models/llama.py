"""Llama 2 and 3, dense: attention in every layer, no norms of queries and keys, no draft head."""

import dataclasses

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields

_OPTIONS = {"sliding_window": ()}
_THETA = 10000.0  # missing in Llama 2's config.json
_DERIVED = ".rotary_emb.inv_freq"  # in older checkpoints; computed from config.json


class Llama(Model):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        kinds = fields.attention_layer_types()
        config = fields.common(kinds, default_theta=_THETA, may_have_biases=True)
        return dataclasses.replace(config, normed_heads=False)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return None if name.endswith(_DERIVED) else name
