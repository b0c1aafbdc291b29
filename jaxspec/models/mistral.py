"""Mistral: Llama's layers, over a sliding window in all of them, some or none."""

import dataclasses

from jaxspec.models.base import Model
from jaxspec.models.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, whole
from jaxspec.models.window_fields import WINDOW, listed_attention

# Used if config.json has none.
_THETA = 10000.0
_WINDOW = 4096  # null means no window


class Mistral(Model):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        window = _WINDOW
        if "sliding_window" in fields.entries:
            window = fields.find("sliding_window", WINDOW)
        kinds = listed_attention(fields)
        if kinds is None:
            kind = FULL_ATTENTION if window is None else SLIDING_ATTENTION
            kinds = (kind,) * fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
        if SLIDING_ATTENTION in kinds and window is None:
            window = fields.need("sliding_window", WINDOW)
        config = fields.common(kinds, default_theta=_THETA)
        return dataclasses.replace(config, normed_heads=False, window=window)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return name
